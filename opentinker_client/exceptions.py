"""Everything that a call can raise.

The table says, for each reason that a server gives: the gRPC status it travels with, the HTTP status of the gateway,
the exception class, and whether sending the same call again can help.
"""

from __future__ import annotations

from typing import Any

# reason                  gRPC status           HTTP  exception                  retryable
TABLE: dict[str, tuple[str, int, str, bool]] = {
    "UNSPECIFIED":         ("INTERNAL",             500, "InternalServerError",       False),
    "INVALID_ARGUMENT":    ("INVALID_ARGUMENT",     400, "BadRequestError",           False),
    "INVALID_DATUM":       ("INVALID_ARGUMENT",     400, "BadRequestError",           False),
    "INVALID_LOSS":        ("INVALID_ARGUMENT",     400, "BadRequestError",           False),
    "CONTEXT_LENGTH":      ("INVALID_ARGUMENT",     400, "BadRequestError",           False),
    "WRONG_KIND":          ("INVALID_ARGUMENT",     400, "BadRequestError",           False),
    "NOT_FOUND":           ("NOT_FOUND",            404, "NotFoundError",             False),
    "ALREADY_EXISTS":      ("ALREADY_EXISTS",       409, "ConflictError",             False),
    "SEQUENCE_CONFLICT":   ("ABORTED",              409, "ConflictError",             False),
    "STATE_LOST":          ("FAILED_PRECONDITION",  409, "StateLostError",            False),
    "SESSION_EXPIRED":     ("FAILED_PRECONDITION",  409, "SessionExpiredError",       False),
    "FAILED_PRECONDITION": ("FAILED_PRECONDITION",  409, "FailedPreconditionError",   False),
    "LIMIT_EXCEEDED":      ("RESOURCE_EXHAUSTED",   429, "RateLimitError",            False),
    "NON_FINITE":          ("FAILED_PRECONDITION",  409, "NonFiniteGradientError",    False),
    "CANCELLED":           ("CANCELLED",            409, "RequestCancelledError",     False),
    "SEQUENCE_GAP":        ("ABORTED",              409, "ConflictError",             False),
    "CORRUPT_DATA":        ("DATA_LOSS",            500, "InternalServerError",       False),
    "UNAVAILABLE":         ("UNAVAILABLE",          503, "InternalServerError",       True),
    "DISK_FULL":           ("RESOURCE_EXHAUSTED",   507, "InternalServerError",       False),
    "INTERNAL":            ("INTERNAL",             500, "InternalServerError",       False),
    "UNAUTHENTICATED":     ("UNAUTHENTICATED",      401, "AuthenticationError",       False),
    "UNSUPPORTED":         ("UNIMPLEMENTED",        422, "UnprocessableEntityError",  False),
}  # fmt: skip

STATUS_OF_REASON = {reason: row[0] for reason, row in TABLE.items()}
"""Reason -> name of its gRPC status."""


class OpenTinkerError(Exception):
    """Root of all errors of this package."""


class APIError(OpenTinkerError):
    """The server refused or failed a call, or could not be reached."""

    def __init__(
        self,
        message: str,
        *,
        reason: str = "",
        request_id: str = "",
        datum_index: int | None = None,
        field: str = "",
        expected: int | None = None,
        actual: int | None = None,
        limit: int | None = None,
    ):
        super().__init__(message)
        self.message = message
        self.reason = reason
        """Name of the server's ErrorReason, such as "INVALID_DATUM"; empty when no server answered."""
        self.request_id = request_id
        """Leads to the server's log."""
        self.datum_index = datum_index
        """Offending datum of the call's data."""
        self.field = field
        """Offending argument, key, path or tensor."""
        self.expected = expected
        self.actual = actual
        self.limit = limit
        """The configured limit that applies."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message), self.__dict__

    @property
    def status_code(self) -> int | None:
        """HTTP status that the reason has at a gateway; None when no server answered."""
        return TABLE[self.reason][1] if self.reason in TABLE else None


def _rebuild(cls: type[APIError], message: str) -> APIError:
    return cls(message)


class APIConnectionError(APIError):
    """The server could not be reached, or the connection was lost and retrying did not help."""


class APITimeoutError(APIConnectionError):
    """No answer in time."""


class APIStatusError(APIError):
    """The server answered with an error."""


class BadRequestError(APIStatusError):
    """The request is wrong and would fail again."""


class AuthenticationError(APIStatusError):
    """No valid API key."""


class PermissionDeniedError(APIStatusError):
    """The key does not allow it."""


class NotFoundError(APIStatusError):
    """No such object, or not the caller's."""


class ConflictError(APIStatusError):
    """The name is taken, or the sequence id was used for another request."""


class FailedPreconditionError(APIStatusError):
    """The object is not in the state that the call needs."""


class StateLostError(FailedPreconditionError):
    """The adapter's live state is gone; restore it from a checkpoint."""


class SessionExpiredError(FailedPreconditionError):
    """The session has ended; restore from a checkpoint in a new one."""


class NonFiniteGradientError(FailedPreconditionError):
    """A gradient was not finite; the step was refused and nothing changed."""


class UnprocessableEntityError(APIStatusError):
    """The server or its base model does not offer what was asked."""


class RateLimitError(APIStatusError):
    """A limit of the server is reached."""


class InternalServerError(APIStatusError):
    """A fault of the server."""


class RequestCancelledError(APIStatusError):
    """The operation was cancelled before it was applied."""


RequestFailedError = APIStatusError
"""Tinker's name for the failure of an accepted request."""
TinkerError = OpenTinkerError
"""Tinker's name for the root of all errors."""


def exception_class(reason: str) -> type[APIStatusError]:
    """The class that a reason is raised as; unknown reasons of newer servers are internal errors."""
    return globals()[TABLE.get(reason, TABLE["UNSPECIFIED"])[2]]
