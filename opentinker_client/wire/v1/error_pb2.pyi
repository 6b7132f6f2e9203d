from google.protobuf import any_pb2 as _any_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ErrorReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ERROR_REASON_UNSPECIFIED: _ClassVar[ErrorReason]
    ERROR_REASON_INVALID_ARGUMENT: _ClassVar[ErrorReason]
    ERROR_REASON_INVALID_DATUM: _ClassVar[ErrorReason]
    ERROR_REASON_INVALID_LOSS: _ClassVar[ErrorReason]
    ERROR_REASON_CONTEXT_LENGTH: _ClassVar[ErrorReason]
    ERROR_REASON_WRONG_KIND: _ClassVar[ErrorReason]
    ERROR_REASON_NOT_FOUND: _ClassVar[ErrorReason]
    ERROR_REASON_ALREADY_EXISTS: _ClassVar[ErrorReason]
    ERROR_REASON_SEQUENCE_CONFLICT: _ClassVar[ErrorReason]
    ERROR_REASON_STATE_LOST: _ClassVar[ErrorReason]
    ERROR_REASON_SESSION_EXPIRED: _ClassVar[ErrorReason]
    ERROR_REASON_FAILED_PRECONDITION: _ClassVar[ErrorReason]
    ERROR_REASON_LIMIT_EXCEEDED: _ClassVar[ErrorReason]
    ERROR_REASON_NON_FINITE: _ClassVar[ErrorReason]
    ERROR_REASON_CANCELLED: _ClassVar[ErrorReason]
    ERROR_REASON_SEQUENCE_GAP: _ClassVar[ErrorReason]
    ERROR_REASON_CORRUPT_DATA: _ClassVar[ErrorReason]
    ERROR_REASON_UNAVAILABLE: _ClassVar[ErrorReason]
    ERROR_REASON_DISK_FULL: _ClassVar[ErrorReason]
    ERROR_REASON_INTERNAL: _ClassVar[ErrorReason]
    ERROR_REASON_UNAUTHENTICATED: _ClassVar[ErrorReason]
    ERROR_REASON_UNSUPPORTED: _ClassVar[ErrorReason]
ERROR_REASON_UNSPECIFIED: ErrorReason
ERROR_REASON_INVALID_ARGUMENT: ErrorReason
ERROR_REASON_INVALID_DATUM: ErrorReason
ERROR_REASON_INVALID_LOSS: ErrorReason
ERROR_REASON_CONTEXT_LENGTH: ErrorReason
ERROR_REASON_WRONG_KIND: ErrorReason
ERROR_REASON_NOT_FOUND: ErrorReason
ERROR_REASON_ALREADY_EXISTS: ErrorReason
ERROR_REASON_SEQUENCE_CONFLICT: ErrorReason
ERROR_REASON_STATE_LOST: ErrorReason
ERROR_REASON_SESSION_EXPIRED: ErrorReason
ERROR_REASON_FAILED_PRECONDITION: ErrorReason
ERROR_REASON_LIMIT_EXCEEDED: ErrorReason
ERROR_REASON_NON_FINITE: ErrorReason
ERROR_REASON_CANCELLED: ErrorReason
ERROR_REASON_SEQUENCE_GAP: ErrorReason
ERROR_REASON_CORRUPT_DATA: ErrorReason
ERROR_REASON_UNAVAILABLE: ErrorReason
ERROR_REASON_DISK_FULL: ErrorReason
ERROR_REASON_INTERNAL: ErrorReason
ERROR_REASON_UNAUTHENTICATED: ErrorReason
ERROR_REASON_UNSUPPORTED: ErrorReason

class ErrorInfo(_message.Message):
    __slots__ = ("reason", "message", "request_id", "datum_index", "field", "expected", "actual", "limit")
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    DATUM_INDEX_FIELD_NUMBER: _ClassVar[int]
    FIELD_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_FIELD_NUMBER: _ClassVar[int]
    ACTUAL_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    reason: ErrorReason
    message: str
    request_id: str
    datum_index: int
    field: str
    expected: int
    actual: int
    limit: int
    def __init__(self, reason: _Optional[_Union[ErrorReason, str]] = ..., message: _Optional[str] = ..., request_id: _Optional[str] = ..., datum_index: _Optional[int] = ..., field: _Optional[str] = ..., expected: _Optional[int] = ..., actual: _Optional[int] = ..., limit: _Optional[int] = ...) -> None: ...

class ErrorStatus(_message.Message):
    __slots__ = ("code", "message", "details")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    DETAILS_FIELD_NUMBER: _ClassVar[int]
    code: int
    message: str
    details: _containers.RepeatedCompositeFieldContainer[_any_pb2.Any]
    def __init__(self, code: _Optional[int] = ..., message: _Optional[str] = ..., details: _Optional[_Iterable[_Union[_any_pb2.Any, _Mapping]]] = ...) -> None: ...
