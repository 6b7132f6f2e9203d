from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetServerInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SupportedModel(_message.Message):
    __slots__ = ("model_name", "max_context_length", "vocab_size", "arch", "accepts_images")
    MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    ARCH_FIELD_NUMBER: _ClassVar[int]
    ACCEPTS_IMAGES_FIELD_NUMBER: _ClassVar[int]
    model_name: str
    max_context_length: int
    vocab_size: int
    arch: str
    accepts_images: bool
    def __init__(self, model_name: _Optional[str] = ..., max_context_length: _Optional[int] = ..., vocab_size: _Optional[int] = ..., arch: _Optional[str] = ..., accepts_images: bool = ...) -> None: ...

class Limits(_message.Message):
    __slots__ = ("max_message_bytes", "max_call_bytes", "max_datums", "max_rank", "max_adapters", "max_num_samples")
    MAX_MESSAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_CALL_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_DATUMS_FIELD_NUMBER: _ClassVar[int]
    MAX_RANK_FIELD_NUMBER: _ClassVar[int]
    MAX_ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    max_message_bytes: int
    max_call_bytes: int
    max_datums: int
    max_rank: int
    max_adapters: int
    max_num_samples: int
    def __init__(self, max_message_bytes: _Optional[int] = ..., max_call_bytes: _Optional[int] = ..., max_datums: _Optional[int] = ..., max_rank: _Optional[int] = ..., max_adapters: _Optional[int] = ..., max_num_samples: _Optional[int] = ...) -> None: ...

class GetServerInfoResponse(_message.Message):
    __slots__ = ("server_version", "models", "limits", "session_lease_s", "loss_fns")
    SERVER_VERSION_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    SESSION_LEASE_S_FIELD_NUMBER: _ClassVar[int]
    LOSS_FNS_FIELD_NUMBER: _ClassVar[int]
    server_version: str
    models: _containers.RepeatedCompositeFieldContainer[SupportedModel]
    limits: Limits
    session_lease_s: float
    loss_fns: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, server_version: _Optional[str] = ..., models: _Optional[_Iterable[_Union[SupportedModel, _Mapping]]] = ..., limits: _Optional[_Union[Limits, _Mapping]] = ..., session_lease_s: _Optional[float] = ..., loss_fns: _Optional[_Iterable[str]] = ...) -> None: ...

class CreateSessionRequest(_message.Message):
    __slots__ = ("client_key", "user_metadata", "client_version")
    class UserMetadataEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    CLIENT_KEY_FIELD_NUMBER: _ClassVar[int]
    USER_METADATA_FIELD_NUMBER: _ClassVar[int]
    CLIENT_VERSION_FIELD_NUMBER: _ClassVar[int]
    client_key: str
    user_metadata: _containers.ScalarMap[str, str]
    client_version: str
    def __init__(self, client_key: _Optional[str] = ..., user_metadata: _Optional[_Mapping[str, str]] = ..., client_version: _Optional[str] = ...) -> None: ...

class CreateSessionResponse(_message.Message):
    __slots__ = ("session_id", "lease_s")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    lease_s: float
    def __init__(self, session_id: _Optional[str] = ..., lease_s: _Optional[float] = ...) -> None: ...

class HeartbeatRequest(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    def __init__(self, session_id: _Optional[str] = ...) -> None: ...

class HeartbeatResponse(_message.Message):
    __slots__ = ("lease_s",)
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    lease_s: float
    def __init__(self, lease_s: _Optional[float] = ...) -> None: ...

class CloseSessionRequest(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    def __init__(self, session_id: _Optional[str] = ...) -> None: ...

class CloseSessionResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
