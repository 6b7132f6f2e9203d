from google.protobuf import timestamp_pb2 as _timestamp_pb2
from opentinker_client.wire.v1 import error_pb2 as _error_pb2
from opentinker_client.wire.v1 import policy_pb2 as _policy_pb2
from opentinker_client.wire.v1 import tensor_pb2 as _tensor_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class OperationKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OPERATION_KIND_UNSPECIFIED: _ClassVar[OperationKind]
    OPERATION_KIND_CREATE_ADAPTER: _ClassVar[OperationKind]
    OPERATION_KIND_FORWARD: _ClassVar[OperationKind]
    OPERATION_KIND_FORWARD_BACKWARD: _ClassVar[OperationKind]
    OPERATION_KIND_OPTIM_STEP: _ClassVar[OperationKind]
    OPERATION_KIND_SAVE_CHECKPOINT: _ClassVar[OperationKind]
    OPERATION_KIND_LOAD_STATE: _ClassVar[OperationKind]
    OPERATION_KIND_PUBLISH_SNAPSHOT: _ClassVar[OperationKind]
    OPERATION_KIND_UNLOAD_ADAPTER: _ClassVar[OperationKind]

class OperationState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OPERATION_STATE_UNSPECIFIED: _ClassVar[OperationState]
    OPERATION_STATE_QUEUED: _ClassVar[OperationState]
    OPERATION_STATE_RUNNING: _ClassVar[OperationState]
    OPERATION_STATE_SUCCEEDED: _ClassVar[OperationState]
    OPERATION_STATE_FAILED: _ClassVar[OperationState]
    OPERATION_STATE_CANCELLED: _ClassVar[OperationState]
OPERATION_KIND_UNSPECIFIED: OperationKind
OPERATION_KIND_CREATE_ADAPTER: OperationKind
OPERATION_KIND_FORWARD: OperationKind
OPERATION_KIND_FORWARD_BACKWARD: OperationKind
OPERATION_KIND_OPTIM_STEP: OperationKind
OPERATION_KIND_SAVE_CHECKPOINT: OperationKind
OPERATION_KIND_LOAD_STATE: OperationKind
OPERATION_KIND_PUBLISH_SNAPSHOT: OperationKind
OPERATION_KIND_UNLOAD_ADAPTER: OperationKind
OPERATION_STATE_UNSPECIFIED: OperationState
OPERATION_STATE_QUEUED: OperationState
OPERATION_STATE_RUNNING: OperationState
OPERATION_STATE_SUCCEEDED: OperationState
OPERATION_STATE_FAILED: OperationState
OPERATION_STATE_CANCELLED: OperationState

class LossOutput(_message.Message):
    __slots__ = ("tensors",)
    class TensorsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: _tensor_pb2.Tensor
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ...) -> None: ...
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    tensors: _containers.MessageMap[str, _tensor_pb2.Tensor]
    def __init__(self, tensors: _Optional[_Mapping[str, _tensor_pb2.Tensor]] = ...) -> None: ...

class ForwardBackwardResult(_message.Message):
    __slots__ = ("outputs", "metrics")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    outputs: _containers.RepeatedCompositeFieldContainer[LossOutput]
    metrics: _containers.ScalarMap[str, float]
    def __init__(self, outputs: _Optional[_Iterable[_Union[LossOutput, _Mapping]]] = ..., metrics: _Optional[_Mapping[str, float]] = ...) -> None: ...

class OptimStepResult(_message.Message):
    __slots__ = ("metrics",)
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    METRICS_FIELD_NUMBER: _ClassVar[int]
    metrics: _containers.ScalarMap[str, float]
    def __init__(self, metrics: _Optional[_Mapping[str, float]] = ...) -> None: ...

class Operation(_message.Message):
    __slots__ = ("op_id", "adapter_id", "seq_id", "kind", "state", "created_at", "started_at", "ended_at", "datums_done", "adapter", "forward_backward", "optim_step", "checkpoint", "snapshot", "error")
    OP_ID_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_ID_FIELD_NUMBER: _ClassVar[int]
    SEQ_ID_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    CREATED_AT_FIELD_NUMBER: _ClassVar[int]
    STARTED_AT_FIELD_NUMBER: _ClassVar[int]
    ENDED_AT_FIELD_NUMBER: _ClassVar[int]
    DATUMS_DONE_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    FORWARD_BACKWARD_FIELD_NUMBER: _ClassVar[int]
    OPTIM_STEP_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    op_id: str
    adapter_id: str
    seq_id: int
    kind: OperationKind
    state: OperationState
    created_at: _timestamp_pb2.Timestamp
    started_at: _timestamp_pb2.Timestamp
    ended_at: _timestamp_pb2.Timestamp
    datums_done: int
    adapter: _policy_pb2.Adapter
    forward_backward: ForwardBackwardResult
    optim_step: OptimStepResult
    checkpoint: _policy_pb2.Checkpoint
    snapshot: _policy_pb2.Snapshot
    error: _error_pb2.ErrorInfo
    def __init__(self, op_id: _Optional[str] = ..., adapter_id: _Optional[str] = ..., seq_id: _Optional[int] = ..., kind: _Optional[_Union[OperationKind, str]] = ..., state: _Optional[_Union[OperationState, str]] = ..., created_at: _Optional[_Union[_timestamp_pb2.Timestamp, _Mapping]] = ..., started_at: _Optional[_Union[_timestamp_pb2.Timestamp, _Mapping]] = ..., ended_at: _Optional[_Union[_timestamp_pb2.Timestamp, _Mapping]] = ..., datums_done: _Optional[int] = ..., adapter: _Optional[_Union[_policy_pb2.Adapter, _Mapping]] = ..., forward_backward: _Optional[_Union[ForwardBackwardResult, _Mapping]] = ..., optim_step: _Optional[_Union[OptimStepResult, _Mapping]] = ..., checkpoint: _Optional[_Union[_policy_pb2.Checkpoint, _Mapping]] = ..., snapshot: _Optional[_Union[_policy_pb2.Snapshot, _Mapping]] = ..., error: _Optional[_Union[_error_pb2.ErrorInfo, _Mapping]] = ...) -> None: ...

class WaitOperationRequest(_message.Message):
    __slots__ = ("op_id", "timeout_ms", "datums_seen")
    OP_ID_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    DATUMS_SEEN_FIELD_NUMBER: _ClassVar[int]
    op_id: str
    timeout_ms: int
    datums_seen: int
    def __init__(self, op_id: _Optional[str] = ..., timeout_ms: _Optional[int] = ..., datums_seen: _Optional[int] = ...) -> None: ...

class WaitOperationResponse(_message.Message):
    __slots__ = ("operation",)
    OPERATION_FIELD_NUMBER: _ClassVar[int]
    operation: Operation
    def __init__(self, operation: _Optional[_Union[Operation, _Mapping]] = ...) -> None: ...

class CancelOperationRequest(_message.Message):
    __slots__ = ("op_id",)
    OP_ID_FIELD_NUMBER: _ClassVar[int]
    op_id: str
    def __init__(self, op_id: _Optional[str] = ...) -> None: ...

class CancelOperationResponse(_message.Message):
    __slots__ = ("operation",)
    OPERATION_FIELD_NUMBER: _ClassVar[int]
    operation: Operation
    def __init__(self, operation: _Optional[_Union[Operation, _Mapping]] = ...) -> None: ...

class ExplainOperationRequest(_message.Message):
    __slots__ = ("op_id",)
    OP_ID_FIELD_NUMBER: _ClassVar[int]
    op_id: str
    def __init__(self, op_id: _Optional[str] = ...) -> None: ...

class ExplainOperationResponse(_message.Message):
    __slots__ = ("explanation", "num_ahead_same_adapter", "num_other_operations", "missing_seq_id")
    EXPLANATION_FIELD_NUMBER: _ClassVar[int]
    NUM_AHEAD_SAME_ADAPTER_FIELD_NUMBER: _ClassVar[int]
    NUM_OTHER_OPERATIONS_FIELD_NUMBER: _ClassVar[int]
    MISSING_SEQ_ID_FIELD_NUMBER: _ClassVar[int]
    explanation: str
    num_ahead_same_adapter: int
    num_other_operations: int
    missing_seq_id: int
    def __init__(self, explanation: _Optional[str] = ..., num_ahead_same_adapter: _Optional[int] = ..., num_other_operations: _Optional[int] = ..., missing_seq_id: _Optional[int] = ...) -> None: ...
