"""Complete checks of requests, before anything is queued. Free of torch; vectorised over tokens.

Every refusal names the datum, the key, and the sizes or value that were needed and found.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from opentinker_client.wire.v1 import datum_pb2, policy_pb2, tensor_pb2, training_pb2
from opentinker_server.scheduler.errors import ServiceError
from opentinker_server.training.loss_specs import LOSS_SPECS, LossSpec, crossed_bounds

DTYPES: dict[int, np.dtype] = {
    tensor_pb2.DTYPE_FLOAT32: np.dtype("<f4"),
    tensor_pb2.DTYPE_INT64: np.dtype("<i8"),
    tensor_pb2.DTYPE_INT32: np.dtype("<i4"),
}
TYPED_KEYS = ("target_tokens", "weights", "logprobs", "advantages", "mask")
MAX_METADATA_ENTRIES = 64
MAX_METADATA_CHARS = 4096


@dataclass(frozen=True, kw_only=True)
class ModelLimits:
    """What the base model allows."""

    name: str
    vocab_size: int
    max_context_length: int
    accepts_images: bool


def check_loss(loss_fn: str, config: Mapping[str, training_pb2.LossConfigValue]) -> LossSpec:
    """The specification of a loss whose name and configuration keys are known and in range."""
    spec = LOSS_SPECS.get(loss_fn)
    if spec is None:
        raise ServiceError(
            "INVALID_LOSS", f"unknown loss_fn {loss_fn!r}; known: {', '.join(sorted(LOSS_SPECS))}", field="loss_fn"
        )
    for key, value in config.items():
        rule = spec.config.get(key)
        if rule is None:
            known = ", ".join(sorted(spec.config)) or "none"
            raise ServiceError("INVALID_LOSS", f"{loss_fn} has no configuration key {key!r}; known: {known}", field=key)
        number = value.number if value.WhichOneof("value") == "number" else math.nan
        if not (math.isfinite(number) and rule.minimum <= number <= rule.maximum):
            raise ServiceError(
                "INVALID_LOSS",
                f"{loss_fn} {key} must be a number from {rule.minimum:g} to {rule.maximum:g}, "
                f"got {value.text or number}",
                field=key,
            )
    complete = {key: config[key].number if key in config else rule.default for key, rule in spec.config.items()}
    if crossed := crossed_bounds(complete):
        low, high = crossed
        raise ServiceError(
            "INVALID_LOSS", f"{loss_fn} {low} {complete[low]:g} is above {high} {complete[high]:g}", field=low
        )
    return spec


def check_data(
    data: Sequence[datum_pb2.Datum], spec: LossSpec, model: ModelLimits, *, max_dense_bytes: int = 2**30
) -> None:
    """Raises ServiceError for the first malformed datum, naming its index.

    Sparse tensors are made dense by the worker: those of one call may take `max_dense_bytes` in all.
    """
    if not data:
        raise ServiceError("INVALID_DATUM", "data is empty: there is nothing to compute", field="data")
    dense_bytes = sum(_dense_bytes(datum) for datum in data)
    if dense_bytes > max_dense_bytes:
        raise ServiceError(
            "LIMIT_EXCEEDED",
            f"the sparse tensors of the call take {dense_bytes} bytes when dense, more than {max_dense_bytes}; send it "
            "as several calls",
            field="data",
            limit=max_dense_bytes,
            actual=dense_bytes,
        )
    for index, datum in enumerate(data):
        try:
            _check_datum(datum, spec, model)
        except ServiceError as error:
            error.info.datum_index = index
            error.info.message = f"datum {index}: {error.info.message}"
            error.args = (error.info.message,)
            raise


def _dense_bytes(datum: datum_pb2.Datum) -> int:
    tensors = [getattr(datum, key) for key in TYPED_KEYS] + list(datum.extras.values())
    return sum(8 * math.prod(max(axis, 0) for axis in tensor.shape) for tensor in tensors if tensor.HasField("csr"))


def _refuse(message: str, *, field: str, expected: int | None = None, actual: int | None = None) -> ServiceError:
    return ServiceError("INVALID_DATUM", message, field=field, expected=expected, actual=actual)


def _check_datum(datum: datum_pb2.Datum, spec: LossSpec, model: ModelLimits) -> None:
    length = len(prompt_tokens(datum.model_input, model))
    if length > model.max_context_length:
        raise ServiceError(
            "CONTEXT_LENGTH",
            f"model_input has {length} tokens, the context of {model.name} is {model.max_context_length}",
            field="model_input",
            expected=model.max_context_length,
            actual=length,
        )
    if not datum.HasField("target_tokens"):
        raise _refuse("target_tokens is missing", field="target_tokens")
    columns = datum.target_tokens.shape[1] if len(datum.target_tokens.shape) == 2 else 1
    if columns > model.vocab_size:
        raise _refuse(
            f"target_tokens has {columns} targets a row, the vocabulary of {model.name} has {model.vocab_size}",
            field="target_tokens",
            expected=model.vocab_size,
            actual=columns,
        )
    targets = array(datum.target_tokens, key="target_tokens")
    if targets.dtype.kind != "i":
        raise _refuse("target_tokens must be int64, got float32", field="target_tokens")
    shapes = "[T]" if not spec.two_dimensional_targets else "[T] or [T, K]"
    if targets.ndim != 1 and not (spec.two_dimensional_targets and targets.ndim == 2 and targets.shape[1] > 0):
        raise _refuse(
            f"target_tokens has shape {list(targets.shape)}; {spec.name} takes {shapes}", field="target_tokens"
        )
    if targets.shape[0] != length:
        raise _refuse(
            f"target_tokens has {targets.shape[0]} rows, model_input has {length} tokens",
            field="target_tokens",
            expected=length,
            actual=targets.shape[0],
        )
    _check_ids(targets, model, key="target_tokens")
    for key in sorted(datum.extras.keys() & set(TYPED_KEYS)):
        raise _refuse(f"extras holds {key!r}, which has a field of its own", field=key)
    present = {key: getattr(datum, key) for key in TYPED_KEYS[1:] if datum.HasField(key)}
    present.update(datum.extras)
    for key in sorted(spec.required - present.keys() - {"target_tokens"}):
        raise _refuse(f"{key} is missing; {spec.name} needs it", field=key)
    for key, tensor in present.items():
        if key not in spec.required and key not in spec.optional:
            takes = ", ".join(sorted(spec.required | spec.optional))
            raise _refuse(f"unknown key {key!r}; {spec.name} takes {takes}", field=key)
        _check_values(tensor, targets.shape, key=key)
    if "clip_low" in present and "clip_high" in present:
        low, high = (array(present[key], key=key) for key in ("clip_low", "clip_high"))
        for index in np.flatnonzero(low > high)[:1]:
            raise _refuse(
                f"clip_low {low[index]:g} is above clip_high {high[index]:g} at index {index}", field="clip_low"
            )


def _check_values(tensor: tensor_pb2.Tensor, shape: tuple[int, ...], *, key: str) -> None:
    wanted = shape if key in ("weights", "mask") else shape[:1]
    if tuple(tensor.shape) != wanted:  # before a sparse tensor is made dense
        raise _refuse(
            f"{key} has shape {list(tensor.shape)}, target_tokens needs {list(wanted)}",
            field=key,
            expected=math.prod(wanted),
            actual=math.prod(tensor.shape),
        )
    values = array(tensor, key=key)
    if values.dtype.kind != "f":
        raise _refuse(f"{key} must be float32, got int", field=key)
    bad = np.flatnonzero(~np.isfinite(values))
    if len(bad):
        raise _refuse(f"{key} is not finite at index {int(bad[0])} ({values.ravel()[bad[0]]})", field=key)
    if key == "mask" and not np.isin(values, (0.0, 1.0)).all():
        raise _refuse("mask must hold 0 and 1 only", field=key)
    if key in ("clip_low", "clip_high") and (values < 0).any():
        index = int(np.argmax(values < 0))
        raise _refuse(f"{key} is an absolute ratio, not {values[index]:g} at index {index}", field=key)


def _check_ids(ids: np.ndarray, model: ModelLimits, *, key: str) -> None:
    bad = np.flatnonzero((ids < 0) | (ids >= model.vocab_size))
    if len(bad):
        value = int(ids.ravel()[bad[0]])
        raise _refuse(
            f"{key} holds id {value} at index {int(bad[0])}; the vocabulary of {model.name} has {model.vocab_size}",
            field=key,
            expected=model.vocab_size,
            actual=value,
        )


def array(tensor: tensor_pb2.Tensor, *, key: str) -> np.ndarray:
    """The tensor as a dense array, its bytes and shape checked against one another."""
    dtype = DTYPES.get(tensor.dtype)
    if dtype is None:
        name = tensor_pb2.Dtype.Name(tensor.dtype) if tensor.dtype in tensor_pb2.Dtype.values() else tensor.dtype
        raise _refuse(f"{key} has element type {name}; float32, int64 and int32 are accepted", field=key)
    shape = tuple(tensor.shape)
    if len(shape) > 2 or any(not 0 <= axis < 2**31 for axis in shape):
        raise _refuse(f"{key} has shape {list(shape)[:4]}; one or two axes below 2^31 are accepted", field=key)
    if tensor.HasField("csr"):
        return _dense(tensor, shape, dtype, key=key)
    needed = math.prod(shape) * dtype.itemsize
    if len(tensor.data) != needed:
        raise _refuse(
            f"{key} has {len(tensor.data)} bytes, its shape {list(shape)} needs {needed}",
            field=key,
            expected=needed,
            actual=len(tensor.data),
        )
    return np.frombuffer(tensor.data, dtype).reshape(shape)


def _dense(tensor: tensor_pb2.Tensor, shape: tuple[int, ...], dtype: np.dtype, *, key: str) -> np.ndarray:
    if len(shape) != 2 or any(len(b) % 8 for b in (tensor.csr.crow_indices, tensor.csr.col_indices)):
        raise _refuse(f"{key} is sparse; it needs two axes and int64 indices", field=key)
    if math.prod(shape) > 2**27:
        raise _refuse(f"{key} has shape {list(shape)}, more than 2^27 elements", field=key)
    rows = np.frombuffer(tensor.csr.crow_indices, "<i8")
    columns = np.frombuffer(tensor.csr.col_indices, "<i8")
    if len(tensor.data) != len(columns) * dtype.itemsize:
        raise _refuse(f"{key} has {len(tensor.data)} bytes for {len(columns)} stored values", field=key)
    consistent = (
        len(rows) == shape[0] + 1
        and rows[0] == 0
        and rows[-1] == len(columns)
        and (np.diff(rows) >= 0).all()
        and ((columns >= 0) & (columns < shape[1])).all()
    )
    if not consistent:
        raise _refuse(f"{key} has inconsistent sparse indices for shape {list(shape)}", field=key)
    dense = np.zeros(shape, dtype)
    dense[np.repeat(np.arange(shape[0]), np.diff(rows)), columns] = np.frombuffer(tensor.data, dtype)
    return dense


def prompt_tokens(model_input: datum_pb2.ModelInput, model: ModelLimits) -> np.ndarray:
    """All token ids of a model input, checked: int32 [T], T >= 1."""
    parts = []
    for chunk in model_input.chunks:
        kind = chunk.WhichOneof("chunk")
        if kind == "image":
            raise ServiceError("UNSUPPORTED", f"{model.name} takes no images", field="model_input")
        if kind is None or len(chunk.text.tokens) % 4:
            raise _refuse("model_input has a chunk that is not int32 token ids", field="model_input")
        parts.append(np.frombuffer(chunk.text.tokens, "<i4"))
    tokens = np.concatenate(parts) if parts else np.empty(0, "<i4")
    if len(tokens) == 0:
        raise _refuse("model_input is empty; at least one token is needed", field="model_input", expected=1, actual=0)
    _check_ids(tokens, model, key="model_input")
    return tokens


ADAM_RANGES = {
    "learning_rate": (0.0, 1e6),
    "beta1": (0.0, 1 - 1e-9),
    "beta2": (0.0, 1 - 1e-9),
    "eps": (1e-30, 1e30),  # what has no gradient is divided by it alone: it must not be zero in float32
    "weight_decay": (0.0, 1e6),
    "grad_clip_norm": (0.0, 1e30),
}
"""Least and greatest value of each field, themselves allowed. Within them no step leaves float32."""
MAX_ALPHA = 1e6
ADAM_DEFAULTS = {
    "learning_rate": 1e-4,
    "beta1": 0.9,
    "beta2": 0.95,
    "eps": 1e-12,
    "weight_decay": 0.0,
    "grad_clip_norm": 0.0,
}


def complete_adam(adam: training_pb2.AdamParams) -> training_pb2.AdamParams:
    """Every field set and in range."""
    refuse_unknown_fields(adam, "adam")
    full = training_pb2.AdamParams(**ADAM_DEFAULTS)
    full.MergeFrom(adam)
    for name, (least, greatest) in ADAM_RANGES.items():
        value = getattr(full, name)
        if not least <= value <= greatest:
            allowed = f"from {least:g} to {greatest:.10g}"
            raise ServiceError("INVALID_ARGUMENT", f"{name} is {value}; it must be {allowed}", field=name)
    decay = full.learning_rate * full.weight_decay
    if decay > 1:
        raise ServiceError(
            "INVALID_ARGUMENT",
            f"learning_rate * weight_decay is {decay:g}; above 1 the decay would overshoot zero",
            field="weight_decay",
        )
    return full


def complete_lora(lora: policy_pb2.LoraConfig, *, max_rank: int, seed: int) -> policy_pb2.LoraConfig:
    """Every field set and in range; `seed` where the caller gave none."""
    refuse_unknown_fields(lora, "lora")
    full = policy_pb2.LoraConfig(
        rank=0, seed=seed, train_attn=True, train_mlp=True, train_unembed=True, alpha=32.0, use_rslora=False
    )
    full.MergeFrom(lora)
    if not 1 <= full.rank <= max_rank:
        raise ServiceError(
            "INVALID_ARGUMENT",
            f"rank is {full.rank}; it must be from 1 to {max_rank}",
            field="rank",
            limit=max_rank,
            actual=full.rank,
        )
    if not (full.train_attn or full.train_mlp or full.train_unembed):
        raise ServiceError(
            "INVALID_ARGUMENT",
            "train_attn, train_mlp and train_unembed are all false: nothing to train",
            field="train_attn",
        )
    if not 0 < full.alpha <= MAX_ALPHA:
        raise ServiceError(
            "INVALID_ARGUMENT", f"alpha is {full.alpha}; it must be above 0 and at most {MAX_ALPHA:g}", field="alpha"
        )
    return full


def refuse_unknown_fields(message: Message, what: str) -> None:
    """A setting that this server does not know must not be dropped: it may be a misspelt one. Raises ServiceError."""
    unknown = UnknownFieldSet(message)
    if len(unknown):
        raise ServiceError(
            "INVALID_ARGUMENT", f"{what} holds a field of number {unknown[0].field_number}, unknown here", field=what
        )


def check_metadata(metadata: Mapping[str, str]) -> dict[str, str]:
    """Free metadata within its bounds."""
    size = sum(len(key) + len(value) for key, value in metadata.items())
    if len(metadata) > MAX_METADATA_ENTRIES or size > MAX_METADATA_CHARS:
        raise ServiceError(
            "LIMIT_EXCEEDED",
            f"user_metadata has {len(metadata)} entries of {size} characters; at most {MAX_METADATA_ENTRIES} entries "
            f"and {MAX_METADATA_CHARS} characters are kept",
            field="user_metadata",
            limit=MAX_METADATA_CHARS,
        )
    return dict(metadata)


def expiry(ttl_seconds: int | None, *, now: float) -> float | None:
    """When something with this time to live ends."""
    if ttl_seconds is None:
        return None
    if not 1 <= ttl_seconds <= 10 * 366 * 86400:
        raise ServiceError(
            "INVALID_ARGUMENT",
            f"ttl_seconds is {ttl_seconds}; it must be from 1 second to 10 years",
            field="ttl_seconds",
            actual=ttl_seconds,
        )
    return now + ttl_seconds
