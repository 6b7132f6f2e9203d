from opentinker_client.wire.v1 import datum_pb2 as _datum_pb2
from opentinker_client.wire.v1 import policy_pb2 as _policy_pb2
from opentinker_client.wire.v1 import tensor_pb2 as _tensor_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LogprobsMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LOGPROBS_MODE_UNSPECIFIED: _ClassVar[LogprobsMode]
    LOGPROBS_MODE_MODEL: _ClassVar[LogprobsMode]
    LOGPROBS_MODE_PROCESSED: _ClassVar[LogprobsMode]

class StopReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STOP_REASON_UNSPECIFIED: _ClassVar[StopReason]
    STOP_REASON_STOP: _ClassVar[StopReason]
    STOP_REASON_LENGTH: _ClassVar[StopReason]
LOGPROBS_MODE_UNSPECIFIED: LogprobsMode
LOGPROBS_MODE_MODEL: LogprobsMode
LOGPROBS_MODE_PROCESSED: LogprobsMode
STOP_REASON_UNSPECIFIED: StopReason
STOP_REASON_STOP: StopReason
STOP_REASON_LENGTH: StopReason

class Sampler(_message.Message):
    __slots__ = ("sampler_id", "base_model", "snapshot")
    SAMPLER_ID_FIELD_NUMBER: _ClassVar[int]
    BASE_MODEL_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    sampler_id: str
    base_model: str
    snapshot: _policy_pb2.Snapshot
    def __init__(self, sampler_id: _Optional[str] = ..., base_model: _Optional[str] = ..., snapshot: _Optional[_Union[_policy_pb2.Snapshot, _Mapping]] = ...) -> None: ...

class CreateSamplerRequest(_message.Message):
    __slots__ = ("session_id", "client_key", "base_model", "uri", "policy")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    CLIENT_KEY_FIELD_NUMBER: _ClassVar[int]
    BASE_MODEL_FIELD_NUMBER: _ClassVar[int]
    URI_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    client_key: str
    base_model: str
    uri: str
    policy: _policy_pb2.PolicyRef
    def __init__(self, session_id: _Optional[str] = ..., client_key: _Optional[str] = ..., base_model: _Optional[str] = ..., uri: _Optional[str] = ..., policy: _Optional[_Union[_policy_pb2.PolicyRef, _Mapping]] = ...) -> None: ...

class CreateSamplerResponse(_message.Message):
    __slots__ = ("sampler",)
    SAMPLER_FIELD_NUMBER: _ClassVar[int]
    sampler: Sampler
    def __init__(self, sampler: _Optional[_Union[Sampler, _Mapping]] = ...) -> None: ...

class RefreshSamplerRequest(_message.Message):
    __slots__ = ("sampler_id", "version")
    SAMPLER_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    sampler_id: str
    version: int
    def __init__(self, sampler_id: _Optional[str] = ..., version: _Optional[int] = ...) -> None: ...

class RefreshSamplerResponse(_message.Message):
    __slots__ = ("sampler",)
    SAMPLER_FIELD_NUMBER: _ClassVar[int]
    sampler: Sampler
    def __init__(self, sampler: _Optional[_Union[Sampler, _Mapping]] = ...) -> None: ...

class DeleteSamplerRequest(_message.Message):
    __slots__ = ("sampler_id",)
    SAMPLER_ID_FIELD_NUMBER: _ClassVar[int]
    sampler_id: str
    def __init__(self, sampler_id: _Optional[str] = ...) -> None: ...

class DeleteSamplerResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StopTexts(_message.Message):
    __slots__ = ("texts",)
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    texts: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, texts: _Optional[_Iterable[str]] = ...) -> None: ...

class StopTokenIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("max_tokens", "seed", "temperature", "top_k", "top_p", "stop_texts", "stop_token_ids", "logprobs_mode")
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    STOP_TEXTS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_MODE_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    seed: int
    temperature: float
    top_k: int
    top_p: float
    stop_texts: StopTexts
    stop_token_ids: StopTokenIds
    logprobs_mode: LogprobsMode
    def __init__(self, max_tokens: _Optional[int] = ..., seed: _Optional[int] = ..., temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., stop_texts: _Optional[_Union[StopTexts, _Mapping]] = ..., stop_token_ids: _Optional[_Union[StopTokenIds, _Mapping]] = ..., logprobs_mode: _Optional[_Union[LogprobsMode, str]] = ...) -> None: ...

class SampleRequest(_message.Message):
    __slots__ = ("sampler_id", "prompt", "num_samples", "params", "prompt_logprobs", "topk_prompt_logprobs", "topk_sample_logprobs")
    SAMPLER_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    NUM_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    PARAMS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOPK_PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOPK_SAMPLE_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    sampler_id: str
    prompt: _datum_pb2.ModelInput
    num_samples: int
    params: SamplingParams
    prompt_logprobs: bool
    topk_prompt_logprobs: int
    topk_sample_logprobs: int
    def __init__(self, sampler_id: _Optional[str] = ..., prompt: _Optional[_Union[_datum_pb2.ModelInput, _Mapping]] = ..., num_samples: _Optional[int] = ..., params: _Optional[_Union[SamplingParams, _Mapping]] = ..., prompt_logprobs: bool = ..., topk_prompt_logprobs: _Optional[int] = ..., topk_sample_logprobs: _Optional[int] = ...) -> None: ...

class TopkLogprobs(_message.Message):
    __slots__ = ("token_ids", "logprobs", "k")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    K_FIELD_NUMBER: _ClassVar[int]
    token_ids: bytes
    logprobs: bytes
    k: int
    def __init__(self, token_ids: _Optional[bytes] = ..., logprobs: _Optional[bytes] = ..., k: _Optional[int] = ...) -> None: ...

class SampledSequence(_message.Message):
    __slots__ = ("tokens", "logprobs", "stop_reason", "topk")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    STOP_REASON_FIELD_NUMBER: _ClassVar[int]
    TOPK_FIELD_NUMBER: _ClassVar[int]
    tokens: bytes
    logprobs: bytes
    stop_reason: StopReason
    topk: TopkLogprobs
    def __init__(self, tokens: _Optional[bytes] = ..., logprobs: _Optional[bytes] = ..., stop_reason: _Optional[_Union[StopReason, str]] = ..., topk: _Optional[_Union[TopkLogprobs, _Mapping]] = ...) -> None: ...

class SampleResponse(_message.Message):
    __slots__ = ("sequences", "prompt_logprobs", "topk_prompt", "snapshot", "prompt_cache_hit_tokens")
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOPK_PROMPT_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_CACHE_HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    sequences: _containers.RepeatedCompositeFieldContainer[SampledSequence]
    prompt_logprobs: _tensor_pb2.Tensor
    topk_prompt: TopkLogprobs
    snapshot: _policy_pb2.Snapshot
    prompt_cache_hit_tokens: int
    def __init__(self, sequences: _Optional[_Iterable[_Union[SampledSequence, _Mapping]]] = ..., prompt_logprobs: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., topk_prompt: _Optional[_Union[TopkLogprobs, _Mapping]] = ..., snapshot: _Optional[_Union[_policy_pb2.Snapshot, _Mapping]] = ..., prompt_cache_hit_tokens: _Optional[int] = ...) -> None: ...

class SampleDelta(_message.Message):
    __slots__ = ("sample_index", "tokens", "logprobs", "stop_reason")
    SAMPLE_INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    STOP_REASON_FIELD_NUMBER: _ClassVar[int]
    sample_index: int
    tokens: bytes
    logprobs: bytes
    stop_reason: StopReason
    def __init__(self, sample_index: _Optional[int] = ..., tokens: _Optional[bytes] = ..., logprobs: _Optional[bytes] = ..., stop_reason: _Optional[_Union[StopReason, str]] = ...) -> None: ...

class StreamSampleRequest(_message.Message):
    __slots__ = ("request",)
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    request: SampleRequest
    def __init__(self, request: _Optional[_Union[SampleRequest, _Mapping]] = ...) -> None: ...

class StreamSampleResponse(_message.Message):
    __slots__ = ("delta", "done")
    DELTA_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    delta: SampleDelta
    done: SampleResponse
    def __init__(self, delta: _Optional[_Union[SampleDelta, _Mapping]] = ..., done: _Optional[_Union[SampleResponse, _Mapping]] = ...) -> None: ...
