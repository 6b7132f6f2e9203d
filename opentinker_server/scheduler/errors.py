"""The one exception that a call or an operation fails with."""

from __future__ import annotations

from opentinker_client.wire.v1 import error_pb2

_INT64 = 2**63 - 1


class ServiceError(Exception):
    """A refusal or failure, as clients see it.

    `reason` is the name of an ErrorReason without its prefix, such as "NOT_FOUND"; the further fields are those of
    `ErrorInfo`.
    """

    def __init__(
        self,
        reason: str,
        message: str,
        *,
        field: str = "",
        datum_index: int | None = None,
        expected: int | None = None,
        actual: int | None = None,
        limit: int | None = None,
    ):
        super().__init__(message)
        self.info = error_pb2.ErrorInfo(
            reason=error_pb2.ErrorReason.Value(f"ERROR_REASON_{reason}"),
            message=message,
            field=field,
            datum_index=datum_index,
            expected=_within_int64(expected),
            actual=_within_int64(actual),
            limit=_within_int64(limit),
        )

    @classmethod
    def of(cls, info: error_pb2.ErrorInfo) -> ServiceError:
        """The exception that carries `info`."""
        error = cls("INTERNAL", info.message)
        error.info.CopyFrom(info)
        return error

    @property
    def reason(self) -> str:
        """Name of the ErrorReason without its prefix."""
        return error_pb2.ErrorReason.Name(self.info.reason).removeprefix("ERROR_REASON_")


def _within_int64(value: int | None) -> int | None:
    """Sizes that a request merely claims may be beyond what the wire carries."""
    return None if value is None else max(-_INT64, min(value, _INT64))
