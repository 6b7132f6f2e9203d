from opentinker_client.wire.v1 import datum_pb2 as _datum_pb2
from opentinker_client.wire.v1 import operation_pb2 as _operation_pb2
from opentinker_client.wire.v1 import policy_pb2 as _policy_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class CreateAdapterRequest(_message.Message):
    __slots__ = ("session_id", "client_key", "base_model", "lora", "user_metadata", "from_uri", "with_optimizer")
    class UserMetadataEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    CLIENT_KEY_FIELD_NUMBER: _ClassVar[int]
    BASE_MODEL_FIELD_NUMBER: _ClassVar[int]
    LORA_FIELD_NUMBER: _ClassVar[int]
    USER_METADATA_FIELD_NUMBER: _ClassVar[int]
    FROM_URI_FIELD_NUMBER: _ClassVar[int]
    WITH_OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    client_key: str
    base_model: str
    lora: _policy_pb2.LoraConfig
    user_metadata: _containers.ScalarMap[str, str]
    from_uri: str
    with_optimizer: bool
    def __init__(self, session_id: _Optional[str] = ..., client_key: _Optional[str] = ..., base_model: _Optional[str] = ..., lora: _Optional[_Union[_policy_pb2.LoraConfig, _Mapping]] = ..., user_metadata: _Optional[_Mapping[str, str]] = ..., from_uri: _Optional[str] = ..., with_optimizer: bool = ...) -> None: ...

class CreateAdapterResponse(_message.Message):
    __slots__ = ("operation",)
    OPERATION_FIELD_NUMBER: _ClassVar[int]
    operation: _operation_pb2.Operation
    def __init__(self, operation: _Optional[_Union[_operation_pb2.Operation, _Mapping]] = ...) -> None: ...

class Sequence(_message.Message):
    __slots__ = ("adapter_id", "seq_id", "abandoned_seq_ids")
    ADAPTER_ID_FIELD_NUMBER: _ClassVar[int]
    SEQ_ID_FIELD_NUMBER: _ClassVar[int]
    ABANDONED_SEQ_IDS_FIELD_NUMBER: _ClassVar[int]
    adapter_id: str
    seq_id: int
    abandoned_seq_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, adapter_id: _Optional[str] = ..., seq_id: _Optional[int] = ..., abandoned_seq_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class LossConfigValue(_message.Message):
    __slots__ = ("number", "text")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    number: float
    text: str
    def __init__(self, number: _Optional[float] = ..., text: _Optional[str] = ...) -> None: ...

class ForwardBackwardHeader(_message.Message):
    __slots__ = ("sequence", "loss_fn", "loss_fn_config", "forward_only", "num_datums", "trained_only")
    class LossFnConfigEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: LossConfigValue
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[LossConfigValue, _Mapping]] = ...) -> None: ...
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    LOSS_FN_FIELD_NUMBER: _ClassVar[int]
    LOSS_FN_CONFIG_FIELD_NUMBER: _ClassVar[int]
    FORWARD_ONLY_FIELD_NUMBER: _ClassVar[int]
    NUM_DATUMS_FIELD_NUMBER: _ClassVar[int]
    TRAINED_ONLY_FIELD_NUMBER: _ClassVar[int]
    sequence: Sequence
    loss_fn: str
    loss_fn_config: _containers.MessageMap[str, LossConfigValue]
    forward_only: bool
    num_datums: int
    trained_only: bool
    def __init__(self, sequence: _Optional[_Union[Sequence, _Mapping]] = ..., loss_fn: _Optional[str] = ..., loss_fn_config: _Optional[_Mapping[str, LossConfigValue]] = ..., forward_only: bool = ..., num_datums: _Optional[int] = ..., trained_only: bool = ...) -> None: ...

class DatumBatch(_message.Message):
    __slots__ = ("data",)
    DATA_FIELD_NUMBER: _ClassVar[int]
    data: _containers.RepeatedCompositeFieldContainer[_datum_pb2.Datum]
    def __init__(self, data: _Optional[_Iterable[_Union[_datum_pb2.Datum, _Mapping]]] = ...) -> None: ...

class ForwardBackwardRequest(_message.Message):
    __slots__ = ("header", "batch")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    header: ForwardBackwardHeader
    batch: DatumBatch
    def __init__(self, header: _Optional[_Union[ForwardBackwardHeader, _Mapping]] = ..., batch: _Optional[_Union[DatumBatch, _Mapping]] = ...) -> None: ...

class ForwardBackwardResponse(_message.Message):
    __slots__ = ("operation",)
    OPERATION_FIELD_NUMBER: _ClassVar[int]
    operation: _operation_pb2.Operation
    def __init__(self, operation: _Optional[_Union[_operation_pb2.Operation, _Mapping]] = ...) -> None: ...

class AdamParams(_message.Message):
    __slots__ = ("learning_rate", "beta1", "beta2", "eps", "weight_decay", "grad_clip_norm")
    LEARNING_RATE_FIELD_NUMBER: _ClassVar[int]
    BETA1_FIELD_NUMBER: _ClassVar[int]
    BETA2_FIELD_NUMBER: _ClassVar[int]
    EPS_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_DECAY_FIELD_NUMBER: _ClassVar[int]
    GRAD_CLIP_NORM_FIELD_NUMBER: _ClassVar[int]
    learning_rate: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    grad_clip_norm: float
    def __init__(self, learning_rate: _Optional[float] = ..., beta1: _Optional[float] = ..., beta2: _Optional[float] = ..., eps: _Optional[float] = ..., weight_decay: _Optional[float] = ..., grad_clip_norm: _Optional[float] = ...) -> None: ...

class OptimStepRequest(_message.Message):
    __slots__ = ("sequence", "adam")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    ADAM_FIELD_NUMBER: _ClassVar[int]
    sequence: Sequence
    adam: AdamParams
    def __init__(self, sequence: _Optional[_Union[Sequence, _Mapping]] = ..., adam: _Optional[_Union[AdamParams, _Mapping]] = ...) -> None: ...

class OptimStepResponse(_message.Message):
    __slots__ = ("operation",)
    OPERATION_FIELD_NUMBER: _ClassVar[int]
    operation: _operation_pb2.Operation
    def __init__(self, operation: _Optional[_Union[_operation_pb2.Operation, _Mapping]] = ...) -> None: ...

class SaveCheckpointRequest(_message.Message):
    __slots__ = ("sequence", "name", "overwrite", "ttl_seconds", "user_metadata")
    class UserMetadataEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    OVERWRITE_FIELD_NUMBER: _ClassVar[int]
    TTL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    USER_METADATA_FIELD_NUMBER: _ClassVar[int]
    sequence: Sequence
    name: str
    overwrite: bool
    ttl_seconds: int
    user_metadata: _containers.ScalarMap[str, str]
    def __init__(self, sequence: _Optional[_Union[Sequence, _Mapping]] = ..., name: _Optional[str] = ..., overwrite: bool = ..., ttl_seconds: _Optional[int] = ..., user_metadata: _Optional[_Mapping[str, str]] = ...) -> None: ...

class SaveCheckpointResponse(_message.Message):
    __slots__ = ("operation",)
    OPERATION_FIELD_NUMBER: _ClassVar[int]
    operation: _operation_pb2.Operation
    def __init__(self, operation: _Optional[_Union[_operation_pb2.Operation, _Mapping]] = ...) -> None: ...

class LoadStateRequest(_message.Message):
    __slots__ = ("sequence", "uri", "with_optimizer")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    URI_FIELD_NUMBER: _ClassVar[int]
    WITH_OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
    sequence: Sequence
    uri: str
    with_optimizer: bool
    def __init__(self, sequence: _Optional[_Union[Sequence, _Mapping]] = ..., uri: _Optional[str] = ..., with_optimizer: bool = ...) -> None: ...

class LoadStateResponse(_message.Message):
    __slots__ = ("operation",)
    OPERATION_FIELD_NUMBER: _ClassVar[int]
    operation: _operation_pb2.Operation
    def __init__(self, operation: _Optional[_Union[_operation_pb2.Operation, _Mapping]] = ...) -> None: ...

class PublishSnapshotRequest(_message.Message):
    __slots__ = ("sequence", "name", "ttl_seconds", "user_metadata")
    class UserMetadataEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    TTL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    USER_METADATA_FIELD_NUMBER: _ClassVar[int]
    sequence: Sequence
    name: str
    ttl_seconds: int
    user_metadata: _containers.ScalarMap[str, str]
    def __init__(self, sequence: _Optional[_Union[Sequence, _Mapping]] = ..., name: _Optional[str] = ..., ttl_seconds: _Optional[int] = ..., user_metadata: _Optional[_Mapping[str, str]] = ...) -> None: ...

class PublishSnapshotResponse(_message.Message):
    __slots__ = ("operation",)
    OPERATION_FIELD_NUMBER: _ClassVar[int]
    operation: _operation_pb2.Operation
    def __init__(self, operation: _Optional[_Union[_operation_pb2.Operation, _Mapping]] = ...) -> None: ...

class UnloadAdapterRequest(_message.Message):
    __slots__ = ("sequence",)
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    sequence: Sequence
    def __init__(self, sequence: _Optional[_Union[Sequence, _Mapping]] = ...) -> None: ...

class UnloadAdapterResponse(_message.Message):
    __slots__ = ("operation",)
    OPERATION_FIELD_NUMBER: _ClassVar[int]
    operation: _operation_pb2.Operation
    def __init__(self, operation: _Optional[_Union[_operation_pb2.Operation, _Mapping]] = ...) -> None: ...

class AttachAdapterRequest(_message.Message):
    __slots__ = ("session_id", "adapter_id")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    adapter_id: str
    def __init__(self, session_id: _Optional[str] = ..., adapter_id: _Optional[str] = ...) -> None: ...

class AttachAdapterResponse(_message.Message):
    __slots__ = ("adapter",)
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    adapter: _policy_pb2.Adapter
    def __init__(self, adapter: _Optional[_Union[_policy_pb2.Adapter, _Mapping]] = ...) -> None: ...
