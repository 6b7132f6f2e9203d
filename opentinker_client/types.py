"""What goes into calls and what comes out of them: frozen records, numpy arrays, nothing of the wire.

Tensors of a datum lie on the target-token axis: row t belongs to input position t, which predicts target_tokens[t].
The caller shifts; nothing here does.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from datetime import datetime
from typing import Any, Literal

import numpy as np

from opentinker_client.arguments import record

StopReason = Literal["stop", "length"]
TensorDtype = Literal["float32", "int64"]
LossFnType = Literal["cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo"]
_NUMPY: dict[str, np.dtype] = {"float32": np.dtype(np.float32), "int64": np.dtype(np.int64)}


@record
class TensorData:
    """A typed array, dense or sparse in rows.

    Sparse: `data` holds the stored values of a [rows, columns] tensor, `sparse_crow_indices` [rows + 1] and
    `sparse_col_indices` [nnz] say where they lie; elements that are not stored are 0.
    """

    data: Any
    """Values in row-major order: a list or a one-dimensional array."""
    dtype: TensorDtype
    shape: Sequence[int] | None = None
    """Length of each axis; None for one axis."""
    sparse_crow_indices: Any = None
    sparse_col_indices: Any = None

    def __post_init__(self) -> None:
        if self.dtype not in _NUMPY:
            raise ValueError(f"dtype is {self.dtype!r}; it must be 'float32' or 'int64'")
        values = _numeric(self.data, what="data").astype(_NUMPY[self.dtype], copy=False).ravel()
        shape = (len(values),) if self.shape is None else tuple(int(axis) for axis in self.shape)
        sparse = self.sparse_crow_indices is not None
        if not sparse and math.prod(shape) != len(values):
            raise ValueError(f"data has {len(values)} values, shape {list(shape)} needs {math.prod(shape)}")
        object.__setattr__(self, "data", values)
        object.__setattr__(self, "shape", shape)
        if sparse:
            for name in ("sparse_crow_indices", "sparse_col_indices"):
                object.__setattr__(self, name, np.asarray(getattr(self, name), dtype=np.int64))

    @classmethod
    def from_numpy(cls, array: np.ndarray) -> TensorData:
        """Any float becomes float32, any integer int64."""
        array = _numeric(array, what="array")
        dtype: TensorDtype = "float32" if array.dtype.kind == "f" else "int64"
        return cls(data=array.ravel(), dtype=dtype, shape=array.shape)

    @classmethod
    def from_torch(cls, tensor: Any) -> TensorData:
        """As `from_numpy`, of a torch tensor on any device."""
        tensor = tensor.detach().cpu()
        return cls.from_numpy(tensor.float().numpy() if tensor.is_floating_point() else tensor.numpy())

    def to_numpy(self) -> np.ndarray:
        """The dense array; do not write into it."""
        assert self.shape is not None
        if self.sparse_crow_indices is None:
            return self.data.reshape(self.shape)
        dense = np.zeros(self.shape, dtype=_NUMPY[self.dtype])
        rows = np.repeat(np.arange(self.shape[0]), np.diff(self.sparse_crow_indices))
        dense[rows, self.sparse_col_indices] = self.data
        return dense

    def to_torch(self) -> Any:
        """The dense array as a torch tensor; torch must be installed."""
        import torch

        return torch.from_numpy(np.array(self.to_numpy()))

    def tolist(self) -> list:
        """The dense array as nested lists."""
        return self.to_numpy().tolist()

    def __len__(self) -> int:
        assert self.shape is not None
        return self.shape[0] if self.shape else 1


def _numeric(value: Any, *, what: str) -> np.ndarray:
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise ValueError(f"{what} is ragged: {error}") from error
    if array.dtype.kind == "b":
        array = array.astype(np.int64)
    if array.size == 0 and array.dtype.kind == "f":
        return array
    if array.dtype.kind not in "fiu":
        raise TypeError(f"{what} must hold numbers, got element type {array.dtype}")
    return array


@record
class EncodedTextChunk:
    """Token ids."""

    tokens: Sequence[int]
    type: str = "encoded_text"

    @property
    def length(self) -> int:
        """Number of tokens."""
        return len(self.tokens)


@record
class ImageChunk:
    """An encoded image; only models with a vision tower take it."""

    data: bytes
    format: Literal["png", "jpeg"]
    expected_tokens: int | None = None
    type: str = "image"

    @property
    def length(self) -> int:
        """Token positions it takes; known only when `expected_tokens` was given."""
        if self.expected_tokens is None:
            raise ValueError("the length of an image is known to the server only; give expected_tokens")
        return self.expected_tokens


ModelInputChunk = EncodedTextChunk | ImageChunk


@record
class ModelInput:
    """What the model reads: chunks laid end to end."""

    chunks: Sequence[ModelInputChunk] = ()

    @classmethod
    def from_ints(cls, tokens: Sequence[int]) -> ModelInput:
        """One chunk of token ids."""
        return cls(chunks=[EncodedTextChunk(tokens=tokens)] if len(tokens) else [])

    @classmethod
    def empty(cls) -> ModelInput:
        """No chunks."""
        return cls()

    def to_ints(self) -> list[int]:
        """All token ids. Raises ValueError when there is an image."""
        tokens: list[int] = []
        for chunk in self.chunks:
            if not isinstance(chunk, EncodedTextChunk):
                raise ValueError("a model input with an image has no token ids")
            tokens.extend(int(token) for token in chunk.tokens)
        return tokens

    @property
    def length(self) -> int:
        """Number of token positions."""
        return sum(chunk.length for chunk in self.chunks)

    def append(self, chunk: ModelInputChunk) -> ModelInput:
        """A new input with one more chunk."""
        return ModelInput(chunks=[*self.chunks, chunk])

    def append_int(self, token: int) -> ModelInput:
        """A new input with one more token."""
        return self.append(EncodedTextChunk(tokens=[token]))


INPUT_DTYPES: dict[str, TensorDtype] = {
    "target_tokens": "int64",
    "weights": "float32",
    "logprobs": "float32",
    "advantages": "float32",
    "mask": "float32",
}
"""Typed keys of a datum's loss inputs."""
LIST_DTYPES: dict[str, TensorDtype] = {
    **INPUT_DTYPES,
    "sequence_ratio_mask": "float32",
    "clip_low": "float32",
    "clip_high": "float32",
}
"""Keys for which lists are accepted."""


@record
class Datum:
    """One training example: an input of T tokens and tensors on the same axis.

    `loss_fn_inputs` maps a key to a TensorData, numpy array, torch tensor or, for the keys named here, a list.
    target_tokens: int64 [T] or [T, K]; weights: float32 like target_tokens; logprobs (natural log), advantages and mask
    (0 or 1): float32 [T]. A reinforcement loss without a mask counts every token. clip_low and clip_high, for ppo and
    cispo: float32 [T], absolute ratio bounds of each token instead of those of the configuration.
    """

    model_input: ModelInput
    loss_fn_inputs: Mapping[str, Any]

    def __post_init__(self) -> None:
        converted = {key: _to_tensor(key, value) for key, value in self.loss_fn_inputs.items()}
        object.__setattr__(self, "loss_fn_inputs", converted)


def _to_tensor(key: str, value: Any) -> TensorData:
    if isinstance(value, TensorData):
        return value
    dtype = LIST_DTYPES.get(key)
    if hasattr(value, "detach"):
        value = TensorData.from_torch(value).to_numpy()
    elif not isinstance(value, np.ndarray):
        if dtype is None:
            known = ", ".join(LIST_DTYPES)
            raise TypeError(f"loss_fn_inputs key {key!r} is a list; lists are accepted for {known}, arrays for any key")
        try:
            value = np.asarray(value, dtype=np.float64 if dtype == "float32" else None)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{key} does not convert to an array of numbers: {error}") from error
        if value.size == 0:
            value = value.astype(_NUMPY[dtype])
    array = _numeric(value, what=key)
    if dtype == "int64" and array.dtype.kind == "f":
        raise TypeError(f"{key} must hold integers, got element type {array.dtype}")
    if dtype is None:
        return TensorData.from_numpy(array)
    return TensorData(data=array.ravel(), dtype=dtype, shape=array.shape)


@record
class LoraConfig:
    """How an adapter is built."""

    rank: int
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True
    alpha: float = 32.0
    """The scale is alpha / rank, or alpha / sqrt(rank) with use_rslora."""
    use_rslora: bool = False


@record
class AdamParams:
    """One step of Adam with decoupled weight decay; moments and step count live with the adapter."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0
    """Largest global L2 norm of the gradient; 0 turns clipping off."""


@record
class SamplingParams:
    """How to generate."""

    max_tokens: int | None = None
    """None: as many as the context leaves."""
    seed: int | None = None
    """Same seed and request, same answer. None: a fresh one each call."""
    stop: str | Sequence[str] | Sequence[int] | None = None
    """Texts stop beside the model's end-of-sequence ids; token ids replace them, [] means no stop at all."""
    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = -1
    top_p: float = 1.0
    logprobs_mode: Literal["model", "processed"] = "model"
    """Which distribution the returned log-probabilities refer to: the model's own, or the one sampled from."""


@record
class Snapshot:
    """Immutable sampler weights of one adapter."""

    adapter_id: str
    version: int
    sha256: str
    uri: str
    name: str
    step: int
    base_model: str
    size_bytes: int
    created_at: datetime | None = None
    expires_at: datetime | None = None
    user_metadata: Mapping[str, str] = field(default_factory=dict)


@record
class ForwardBackwardOutput:
    """Result of forward and forward_backward."""

    loss_fn_output_type: str
    loss_fn_outputs: list[dict[str, TensorData]]
    """One per datum, in order: "logprobs", float32 like target_tokens, natural log at temperature 1."""
    metrics: dict[str, float]
    """"<name>:<reduction>"; always "loss:sum"."""


@record
class OptimStepResponse:
    """Result of optim_step."""

    metrics: dict[str, float] | None = None
    """grad_norm (before clipping), step, learning_rate."""


@record
class SaveWeightsResponse:
    """A saved checkpoint."""

    path: str


@record
class SaveWeightsForSamplerResponse:
    """A published snapshot."""

    path: str
    snapshot: Snapshot | None = None


@record
class LoadWeightsResponse:
    """Loaded."""

    path: str | None = None
    model_id: str | None = None


@record
class UnloadResponse:
    """The adapter is no longer live."""

    model_id: str


TopkLogprobs = list[list[tuple[int, float]] | None]
"""Per position, most likely first: (token, natural log); None where there is no distribution."""


@record
class SampledSequence:
    """One sample."""

    stop_reason: StopReason
    tokens: list[int]
    """A matched stop token is included."""
    logprobs: list[float]
    """Natural log, as long as tokens."""
    snapshot: Snapshot | None = None
    """What produced it; None for the base model."""
    topk_logprobs: TopkLogprobs | None = None

    @property
    def policy_version(self) -> int | None:
        """Version of the snapshot; None for the base model."""
        return None if self.snapshot is None else self.snapshot.version

    @property
    def tokens_np(self) -> np.ndarray:
        """int32 [num_tokens]"""
        return np.asarray(self.tokens, dtype=np.int32)

    @property
    def logprobs_np(self) -> np.ndarray:
        """float32 [num_tokens]"""
        return np.asarray(self.logprobs, dtype=np.float32)


@record
class SampleResponse:
    """All samples of a call."""

    sequences: list[SampledSequence]
    prompt_logprobs: list[float | None] | None = None
    """As long as the prompt; None at index 0."""
    topk_prompt_logprobs: TopkLogprobs | None = None
    snapshot: Snapshot | None = None
    prompt_cache_hit_tokens: int = 0

    @property
    def policy_version(self) -> int | None:
        """Version of the snapshot; None for the base model."""
        return None if self.snapshot is None else self.snapshot.version

    def __iter__(self) -> Iterator[SampledSequence]:
        return iter(self.sequences)


@record
class SampleDelta:
    """Next tokens of one sample of a stream."""

    sample_index: int
    tokens: list[int]
    logprobs: list[float]
    stop_reason: StopReason | None = None


@record
class ModelData:
    """The base model of an adapter."""

    arch: str | None = None
    model_name: str | None = None
    tokenizer_id: str | None = None


@record
class GetInfoResponse:
    """What an adapter is."""

    model_id: str
    model_data: ModelData
    is_lora: bool
    lora_rank: int
    model_name: str
    lora: LoraConfig
    type: str = "get_info"


@record
class SupportedModel:
    """A base model on offer."""

    model_name: str
    max_context_length: int
    vocab_size: int
    arch: str
    trainable: bool = True
    sampleable: bool = True


@record
class Limits:
    """What the server enforces."""

    max_message_bytes: int
    max_call_bytes: int
    max_datums: int
    max_rank: int
    max_adapters: int
    max_num_samples: int


@record
class GetServerCapabilitiesResponse:
    """What the server is and offers."""

    supported_models: list[SupportedModel]
    server_version: str
    limits: Limits
    loss_fns: list[str]
    session_lease_s: float


@record
class Cursor:
    """Place of a page in its list."""

    offset: int
    limit: int
    total_count: int


@record
class TrainingRun:
    """An adapter with its history, as Tinker names it."""

    training_run_id: str
    base_model: str
    model_owner: str
    is_lora: bool
    last_request_time: datetime
    lora_rank: int | None = None
    corrupted: bool = False
    state: str = "active"
    """active, unloaded or lost."""
    step: int = 0
    latest_version: int = 0
    created_at: datetime | None = None
    user_metadata: Mapping[str, str] | None = None


@record
class TrainingRunsResponse:
    """A page of runs, newest first."""

    training_runs: list[TrainingRun]
    cursor: Cursor


@record
class Checkpoint:
    """A saved checkpoint (training) or named snapshot (sampler)."""

    checkpoint_id: str
    checkpoint_type: Literal["training", "sampler"]
    time: datetime
    tinker_path: str
    size_bytes: int | None = None
    public: bool = False
    user_metadata: Mapping[str, str] | None = None
    expires_at: datetime | None = None
    step: int = 0
    sha256: str = ""


@record
class CheckpointsListResponse:
    """Checkpoints, newest first."""

    checkpoints: list[Checkpoint]
    cursor: Cursor


@record
class SnapshotsListResponse:
    """A page of snapshots, newest first."""

    snapshots: list[Snapshot]
    cursor: Cursor


@record
class WeightsInfoResponse:
    """What a checkpoint or snapshot holds."""

    path: str
    checkpoint_type: Literal["training", "sampler"]
    base_model: str
    is_lora: bool
    lora_rank: int | None
    step: int
    sha256: str
    size_bytes: int
    train_unembed: bool | None = None
    train_mlp: bool | None = None
    train_attn: bool | None = None
