from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class AdapterState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ADAPTER_STATE_UNSPECIFIED: _ClassVar[AdapterState]
    ADAPTER_STATE_ACTIVE: _ClassVar[AdapterState]
    ADAPTER_STATE_UNLOADED: _ClassVar[AdapterState]
    ADAPTER_STATE_LOST: _ClassVar[AdapterState]
ADAPTER_STATE_UNSPECIFIED: AdapterState
ADAPTER_STATE_ACTIVE: AdapterState
ADAPTER_STATE_UNLOADED: AdapterState
ADAPTER_STATE_LOST: AdapterState

class LoraConfig(_message.Message):
    __slots__ = ("rank", "seed", "train_attn", "train_mlp", "train_unembed", "alpha", "use_rslora")
    RANK_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    TRAIN_ATTN_FIELD_NUMBER: _ClassVar[int]
    TRAIN_MLP_FIELD_NUMBER: _ClassVar[int]
    TRAIN_UNEMBED_FIELD_NUMBER: _ClassVar[int]
    ALPHA_FIELD_NUMBER: _ClassVar[int]
    USE_RSLORA_FIELD_NUMBER: _ClassVar[int]
    rank: int
    seed: int
    train_attn: bool
    train_mlp: bool
    train_unembed: bool
    alpha: float
    use_rslora: bool
    def __init__(self, rank: _Optional[int] = ..., seed: _Optional[int] = ..., train_attn: bool = ..., train_mlp: bool = ..., train_unembed: bool = ..., alpha: _Optional[float] = ..., use_rslora: bool = ...) -> None: ...

class Adapter(_message.Message):
    __slots__ = ("adapter_id", "base_model", "lora", "state", "session_id", "user_metadata", "created_at", "last_used_at", "step", "latest_version", "next_seq_id")
    class UserMetadataEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    ADAPTER_ID_FIELD_NUMBER: _ClassVar[int]
    BASE_MODEL_FIELD_NUMBER: _ClassVar[int]
    LORA_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    USER_METADATA_FIELD_NUMBER: _ClassVar[int]
    CREATED_AT_FIELD_NUMBER: _ClassVar[int]
    LAST_USED_AT_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    LATEST_VERSION_FIELD_NUMBER: _ClassVar[int]
    NEXT_SEQ_ID_FIELD_NUMBER: _ClassVar[int]
    adapter_id: str
    base_model: str
    lora: LoraConfig
    state: AdapterState
    session_id: str
    user_metadata: _containers.ScalarMap[str, str]
    created_at: _timestamp_pb2.Timestamp
    last_used_at: _timestamp_pb2.Timestamp
    step: int
    latest_version: int
    next_seq_id: int
    def __init__(self, adapter_id: _Optional[str] = ..., base_model: _Optional[str] = ..., lora: _Optional[_Union[LoraConfig, _Mapping]] = ..., state: _Optional[_Union[AdapterState, str]] = ..., session_id: _Optional[str] = ..., user_metadata: _Optional[_Mapping[str, str]] = ..., created_at: _Optional[_Union[_timestamp_pb2.Timestamp, _Mapping]] = ..., last_used_at: _Optional[_Union[_timestamp_pb2.Timestamp, _Mapping]] = ..., step: _Optional[int] = ..., latest_version: _Optional[int] = ..., next_seq_id: _Optional[int] = ...) -> None: ...

class Snapshot(_message.Message):
    __slots__ = ("adapter_id", "version", "sha256", "uri", "name", "step", "base_model", "size_bytes", "created_at", "expires_at", "user_metadata")
    class UserMetadataEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    ADAPTER_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    URI_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    BASE_MODEL_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    CREATED_AT_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_AT_FIELD_NUMBER: _ClassVar[int]
    USER_METADATA_FIELD_NUMBER: _ClassVar[int]
    adapter_id: str
    version: int
    sha256: str
    uri: str
    name: str
    step: int
    base_model: str
    size_bytes: int
    created_at: _timestamp_pb2.Timestamp
    expires_at: _timestamp_pb2.Timestamp
    user_metadata: _containers.ScalarMap[str, str]
    def __init__(self, adapter_id: _Optional[str] = ..., version: _Optional[int] = ..., sha256: _Optional[str] = ..., uri: _Optional[str] = ..., name: _Optional[str] = ..., step: _Optional[int] = ..., base_model: _Optional[str] = ..., size_bytes: _Optional[int] = ..., created_at: _Optional[_Union[_timestamp_pb2.Timestamp, _Mapping]] = ..., expires_at: _Optional[_Union[_timestamp_pb2.Timestamp, _Mapping]] = ..., user_metadata: _Optional[_Mapping[str, str]] = ...) -> None: ...

class Checkpoint(_message.Message):
    __slots__ = ("adapter_id", "name", "uri", "step", "sha256", "base_model", "size_bytes", "created_at", "expires_at", "user_metadata", "lora")
    class UserMetadataEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    ADAPTER_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    URI_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    BASE_MODEL_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    CREATED_AT_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_AT_FIELD_NUMBER: _ClassVar[int]
    USER_METADATA_FIELD_NUMBER: _ClassVar[int]
    LORA_FIELD_NUMBER: _ClassVar[int]
    adapter_id: str
    name: str
    uri: str
    step: int
    sha256: str
    base_model: str
    size_bytes: int
    created_at: _timestamp_pb2.Timestamp
    expires_at: _timestamp_pb2.Timestamp
    user_metadata: _containers.ScalarMap[str, str]
    lora: LoraConfig
    def __init__(self, adapter_id: _Optional[str] = ..., name: _Optional[str] = ..., uri: _Optional[str] = ..., step: _Optional[int] = ..., sha256: _Optional[str] = ..., base_model: _Optional[str] = ..., size_bytes: _Optional[int] = ..., created_at: _Optional[_Union[_timestamp_pb2.Timestamp, _Mapping]] = ..., expires_at: _Optional[_Union[_timestamp_pb2.Timestamp, _Mapping]] = ..., user_metadata: _Optional[_Mapping[str, str]] = ..., lora: _Optional[_Union[LoraConfig, _Mapping]] = ...) -> None: ...

class PolicyRef(_message.Message):
    __slots__ = ("adapter_id", "version")
    ADAPTER_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    adapter_id: str
    version: int
    def __init__(self, adapter_id: _Optional[str] = ..., version: _Optional[int] = ...) -> None: ...
