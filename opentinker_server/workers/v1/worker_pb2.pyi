from opentinker_client.wire.v1 import datum_pb2 as _datum_pb2
from opentinker_client.wire.v1 import error_pb2 as _error_pb2
from opentinker_client.wire.v1 import operation_pb2 as _operation_pb2
from opentinker_client.wire.v1 import policy_pb2 as _policy_pb2
from opentinker_client.wire.v1 import sampling_pb2 as _sampling_pb2
from opentinker_client.wire.v1 import training_pb2 as _training_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class CreateAdapter(_message.Message):
    __slots__ = ("adapter_id", "lora", "directory", "with_optimizer")
    ADAPTER_ID_FIELD_NUMBER: _ClassVar[int]
    LORA_FIELD_NUMBER: _ClassVar[int]
    DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    WITH_OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
    adapter_id: str
    lora: _policy_pb2.LoraConfig
    directory: str
    with_optimizer: bool
    def __init__(self, adapter_id: _Optional[str] = ..., lora: _Optional[_Union[_policy_pb2.LoraConfig, _Mapping]] = ..., directory: _Optional[str] = ..., with_optimizer: bool = ...) -> None: ...

class DropAdapter(_message.Message):
    __slots__ = ("adapter_id",)
    ADAPTER_ID_FIELD_NUMBER: _ClassVar[int]
    adapter_id: str
    def __init__(self, adapter_id: _Optional[str] = ...) -> None: ...

class ForwardBackward(_message.Message):
    __slots__ = ("adapter_id", "loss_fn", "loss_fn_config", "forward_only", "data", "trained_only")
    class LossFnConfigEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: _training_pb2.LossConfigValue
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[_training_pb2.LossConfigValue, _Mapping]] = ...) -> None: ...
    ADAPTER_ID_FIELD_NUMBER: _ClassVar[int]
    LOSS_FN_FIELD_NUMBER: _ClassVar[int]
    LOSS_FN_CONFIG_FIELD_NUMBER: _ClassVar[int]
    FORWARD_ONLY_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    TRAINED_ONLY_FIELD_NUMBER: _ClassVar[int]
    adapter_id: str
    loss_fn: str
    loss_fn_config: _containers.MessageMap[str, _training_pb2.LossConfigValue]
    forward_only: bool
    data: _containers.RepeatedCompositeFieldContainer[_datum_pb2.Datum]
    trained_only: bool
    def __init__(self, adapter_id: _Optional[str] = ..., loss_fn: _Optional[str] = ..., loss_fn_config: _Optional[_Mapping[str, _training_pb2.LossConfigValue]] = ..., forward_only: bool = ..., data: _Optional[_Iterable[_Union[_datum_pb2.Datum, _Mapping]]] = ..., trained_only: bool = ...) -> None: ...

class OptimStep(_message.Message):
    __slots__ = ("adapter_id", "adam")
    ADAPTER_ID_FIELD_NUMBER: _ClassVar[int]
    ADAM_FIELD_NUMBER: _ClassVar[int]
    adapter_id: str
    adam: _training_pb2.AdamParams
    def __init__(self, adapter_id: _Optional[str] = ..., adam: _Optional[_Union[_training_pb2.AdamParams, _Mapping]] = ...) -> None: ...

class SaveState(_message.Message):
    __slots__ = ("adapter_id", "directory")
    ADAPTER_ID_FIELD_NUMBER: _ClassVar[int]
    DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    adapter_id: str
    directory: str
    def __init__(self, adapter_id: _Optional[str] = ..., directory: _Optional[str] = ...) -> None: ...

class LoadState(_message.Message):
    __slots__ = ("adapter_id", "directory", "with_optimizer")
    ADAPTER_ID_FIELD_NUMBER: _ClassVar[int]
    DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    WITH_OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
    adapter_id: str
    directory: str
    with_optimizer: bool
    def __init__(self, adapter_id: _Optional[str] = ..., directory: _Optional[str] = ..., with_optimizer: bool = ...) -> None: ...

class PublishSnapshot(_message.Message):
    __slots__ = ("adapter_id", "snapshot_key", "directory")
    ADAPTER_ID_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_KEY_FIELD_NUMBER: _ClassVar[int]
    DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    adapter_id: str
    snapshot_key: str
    directory: str
    def __init__(self, adapter_id: _Optional[str] = ..., snapshot_key: _Optional[str] = ..., directory: _Optional[str] = ...) -> None: ...

class LoadSnapshot(_message.Message):
    __slots__ = ("snapshot_key", "directory", "sha256")
    SNAPSHOT_KEY_FIELD_NUMBER: _ClassVar[int]
    DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    snapshot_key: str
    directory: str
    sha256: str
    def __init__(self, snapshot_key: _Optional[str] = ..., directory: _Optional[str] = ..., sha256: _Optional[str] = ...) -> None: ...

class DropSnapshot(_message.Message):
    __slots__ = ("snapshot_key",)
    SNAPSHOT_KEY_FIELD_NUMBER: _ClassVar[int]
    snapshot_key: str
    def __init__(self, snapshot_key: _Optional[str] = ...) -> None: ...

class Sample(_message.Message):
    __slots__ = ("snapshot_key", "request", "stream")
    SNAPSHOT_KEY_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    STREAM_FIELD_NUMBER: _ClassVar[int]
    snapshot_key: str
    request: _sampling_pb2.SampleRequest
    stream: bool
    def __init__(self, snapshot_key: _Optional[str] = ..., request: _Optional[_Union[_sampling_pb2.SampleRequest, _Mapping]] = ..., stream: bool = ...) -> None: ...

class Cancel(_message.Message):
    __slots__ = ("command_id",)
    COMMAND_ID_FIELD_NUMBER: _ClassVar[int]
    command_id: int
    def __init__(self, command_id: _Optional[int] = ...) -> None: ...

class ExportMerged(_message.Message):
    __slots__ = ("source_directory", "target_directory")
    SOURCE_DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    TARGET_DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    source_directory: str
    target_directory: str
    def __init__(self, source_directory: _Optional[str] = ..., target_directory: _Optional[str] = ...) -> None: ...

class GetStats(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Ping(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Shutdown(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WorkerCommand(_message.Message):
    __slots__ = ("command_id", "create_adapter", "drop_adapter", "forward_backward", "optim_step", "save_state", "load_state", "publish_snapshot", "load_snapshot", "drop_snapshot", "sample", "cancel", "export_merged", "get_stats", "shutdown", "ping")
    COMMAND_ID_FIELD_NUMBER: _ClassVar[int]
    CREATE_ADAPTER_FIELD_NUMBER: _ClassVar[int]
    DROP_ADAPTER_FIELD_NUMBER: _ClassVar[int]
    FORWARD_BACKWARD_FIELD_NUMBER: _ClassVar[int]
    OPTIM_STEP_FIELD_NUMBER: _ClassVar[int]
    SAVE_STATE_FIELD_NUMBER: _ClassVar[int]
    LOAD_STATE_FIELD_NUMBER: _ClassVar[int]
    PUBLISH_SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    LOAD_SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    DROP_SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    EXPORT_MERGED_FIELD_NUMBER: _ClassVar[int]
    GET_STATS_FIELD_NUMBER: _ClassVar[int]
    SHUTDOWN_FIELD_NUMBER: _ClassVar[int]
    PING_FIELD_NUMBER: _ClassVar[int]
    command_id: int
    create_adapter: CreateAdapter
    drop_adapter: DropAdapter
    forward_backward: ForwardBackward
    optim_step: OptimStep
    save_state: SaveState
    load_state: LoadState
    publish_snapshot: PublishSnapshot
    load_snapshot: LoadSnapshot
    drop_snapshot: DropSnapshot
    sample: Sample
    cancel: Cancel
    export_merged: ExportMerged
    get_stats: GetStats
    shutdown: Shutdown
    ping: Ping
    def __init__(self, command_id: _Optional[int] = ..., create_adapter: _Optional[_Union[CreateAdapter, _Mapping]] = ..., drop_adapter: _Optional[_Union[DropAdapter, _Mapping]] = ..., forward_backward: _Optional[_Union[ForwardBackward, _Mapping]] = ..., optim_step: _Optional[_Union[OptimStep, _Mapping]] = ..., save_state: _Optional[_Union[SaveState, _Mapping]] = ..., load_state: _Optional[_Union[LoadState, _Mapping]] = ..., publish_snapshot: _Optional[_Union[PublishSnapshot, _Mapping]] = ..., load_snapshot: _Optional[_Union[LoadSnapshot, _Mapping]] = ..., drop_snapshot: _Optional[_Union[DropSnapshot, _Mapping]] = ..., sample: _Optional[_Union[Sample, _Mapping]] = ..., cancel: _Optional[_Union[Cancel, _Mapping]] = ..., export_merged: _Optional[_Union[ExportMerged, _Mapping]] = ..., get_stats: _Optional[_Union[GetStats, _Mapping]] = ..., shutdown: _Optional[_Union[Shutdown, _Mapping]] = ..., ping: _Optional[_Union[Ping, _Mapping]] = ...) -> None: ...

class Ready(_message.Message):
    __slots__ = ("base_model", "tokenizer_directory", "vocab_size", "max_context_length", "arch", "eos_token_ids", "adaptable", "accepts_images")
    BASE_MODEL_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    ARCH_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    ADAPTABLE_FIELD_NUMBER: _ClassVar[int]
    ACCEPTS_IMAGES_FIELD_NUMBER: _ClassVar[int]
    base_model: str
    tokenizer_directory: str
    vocab_size: int
    max_context_length: int
    arch: str
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    adaptable: _containers.RepeatedScalarFieldContainer[str]
    accepts_images: bool
    def __init__(self, base_model: _Optional[str] = ..., tokenizer_directory: _Optional[str] = ..., vocab_size: _Optional[int] = ..., max_context_length: _Optional[int] = ..., arch: _Optional[str] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., adaptable: _Optional[_Iterable[str]] = ..., accepts_images: bool = ...) -> None: ...

class SavedFiles(_message.Message):
    __slots__ = ("sha256", "size_bytes")
    SHA256_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    sha256: str
    size_bytes: int
    def __init__(self, sha256: _Optional[str] = ..., size_bytes: _Optional[int] = ...) -> None: ...

class Stats(_message.Message):
    __slots__ = ("values",)
    class ValuesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    VALUES_FIELD_NUMBER: _ClassVar[int]
    values: _containers.ScalarMap[str, float]
    def __init__(self, values: _Optional[_Mapping[str, float]] = ...) -> None: ...

class Done(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WorkerReply(_message.Message):
    __slots__ = ("command_id", "final", "step", "done", "error", "forward_backward", "optim_step", "saved", "sample_delta", "sample", "stats", "datums_done", "ready")
    COMMAND_ID_FIELD_NUMBER: _ClassVar[int]
    FINAL_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    FORWARD_BACKWARD_FIELD_NUMBER: _ClassVar[int]
    OPTIM_STEP_FIELD_NUMBER: _ClassVar[int]
    SAVED_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_DELTA_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_FIELD_NUMBER: _ClassVar[int]
    STATS_FIELD_NUMBER: _ClassVar[int]
    DATUMS_DONE_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    command_id: int
    final: bool
    step: int
    done: Done
    error: _error_pb2.ErrorInfo
    forward_backward: _operation_pb2.ForwardBackwardResult
    optim_step: _operation_pb2.OptimStepResult
    saved: SavedFiles
    sample_delta: _sampling_pb2.SampleDelta
    sample: _sampling_pb2.SampleResponse
    stats: Stats
    datums_done: int
    ready: Ready
    def __init__(self, command_id: _Optional[int] = ..., final: bool = ..., step: _Optional[int] = ..., done: _Optional[_Union[Done, _Mapping]] = ..., error: _Optional[_Union[_error_pb2.ErrorInfo, _Mapping]] = ..., forward_backward: _Optional[_Union[_operation_pb2.ForwardBackwardResult, _Mapping]] = ..., optim_step: _Optional[_Union[_operation_pb2.OptimStepResult, _Mapping]] = ..., saved: _Optional[_Union[SavedFiles, _Mapping]] = ..., sample_delta: _Optional[_Union[_sampling_pb2.SampleDelta, _Mapping]] = ..., sample: _Optional[_Union[_sampling_pb2.SampleResponse, _Mapping]] = ..., stats: _Optional[_Union[Stats, _Mapping]] = ..., datums_done: _Optional[int] = ..., ready: _Optional[_Union[Ready, _Mapping]] = ...) -> None: ...
