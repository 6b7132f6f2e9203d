"""Protobuf messages to what training and sampling take, and back; the only place in a worker that knows both.

Tensors are raw little-endian bytes and are never touched element by element. The control plane has validated what
arrives; what is still malformed is refused rather than guessed.

Shape legend: T target tokens of a datum, K targets per token, P prompt tokens.
"""

import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import numpy as np
from google.protobuf.message import Message

from opentinker_client.wire.v1 import (
    datum_pb2,
    error_pb2,
    operation_pb2,
    policy_pb2,
    sampling_pb2,
    tensor_pb2,
    training_pb2,
)
from opentinker_server.models.base import ModelInfo
from opentinker_server.models.peft_adapter import LoraSettings
from opentinker_server.sampler.base import (
    Delta,
    SampledSequence,
    SampleOutput,
    SampleTask,
    SamplingError,
    SamplingSettings,
    StopReason,
    TopkLogprobs,
)
from opentinker_server.training.datum import TrainDatum
from opentinker_server.training.errors import TrainingError
from opentinker_server.training.optimizer import AdamSettings
from opentinker_server.training.trainer import ForwardBackwardOutput
from opentinker_server.workers.v1 import worker_pb2

_NUMPY_DTYPES: dict[int, np.dtype] = {
    tensor_pb2.DTYPE_FLOAT32: np.dtype("<f4"),
    tensor_pb2.DTYPE_INT64: np.dtype("<i8"),
    tensor_pb2.DTYPE_INT32: np.dtype("<i4"),
    tensor_pb2.DTYPE_BFLOAT16: np.dtype("<u2"),
}
_INPUT_FIELDS = ("weights", "logprobs", "advantages", "mask")
_STOP_REASONS: dict[StopReason | None, "sampling_pb2.StopReason"] = {
    None: sampling_pb2.STOP_REASON_UNSPECIFIED,
    "stop": sampling_pb2.STOP_REASON_STOP,
    "length": sampling_pb2.STOP_REASON_LENGTH,
}
_LOGPROBS_MODES: dict[int, Literal["model", "processed"]] = {
    sampling_pb2.LOGPROBS_MODE_UNSPECIFIED: "model",
    sampling_pb2.LOGPROBS_MODE_MODEL: "model",
    sampling_pb2.LOGPROBS_MODE_PROCESSED: "processed",
}


def decode_tensor(tensor: tensor_pb2.Tensor) -> np.ndarray:
    """The array, of its shape; bfloat16 becomes float32, sparse becomes dense.

    Raises ValueError when the dtype is not set or sizes do not agree.
    """
    if tensor.dtype not in _NUMPY_DTYPES:
        raise ValueError("the tensor has no dtype")
    if any(length < 0 for length in tensor.shape):
        raise ValueError(f"the shape {list(tensor.shape)} has a negative length")
    values = _from_bytes(tensor.data, _NUMPY_DTYPES[tensor.dtype])
    if tensor.dtype == tensor_pb2.DTYPE_BFLOAT16:
        values = (values.astype(np.uint32) << 16).view(np.float32)
    if tensor.HasField("csr"):
        return _densify(values, tensor.csr, tuple(tensor.shape))
    return values.reshape(tuple(tensor.shape))


def encode_tensor(array: np.ndarray) -> tensor_pb2.Tensor:
    """Of a float32, int64 or int32 array."""
    dtypes = {
        np.dtype(np.float32): tensor_pb2.DTYPE_FLOAT32,
        np.dtype(np.int64): tensor_pb2.DTYPE_INT64,
        np.dtype(np.int32): tensor_pb2.DTYPE_INT32,
    }
    return tensor_pb2.Tensor(data=_to_bytes(array), dtype=dtypes[array.dtype], shape=array.shape)


def decode_datum(datum: datum_pb2.Datum, *, datum_index: int) -> TrainDatum:
    """Raises TrainingError, naming `datum_index` and the field, when sizes or dtypes do not agree."""
    tokens = _decode_tokens(datum.model_input)
    if tokens is None:
        raise _bad_datum(datum_index, "model_input", "holds an image, which this model does not take", "UNSUPPORTED")
    targets = _decode_field(datum.target_tokens, "target_tokens", np.dtype(np.int64), datum_index=datum_index)
    inputs = {name: getattr(datum, name) for name in _INPUT_FIELDS if datum.HasField(name)} | dict(datum.extras)
    decoded = {
        name: _decode_field(tensor, name, np.dtype(np.float32), datum_index=datum_index)
        for name, tensor in inputs.items()
    }
    for name, array in {"target_tokens": targets, **decoded}.items():
        if array.ndim not in (1, 2) or len(array) != len(tokens):
            actual = len(array) if array.ndim else 0
            raise _bad_datum(datum_index, name, "is not as long as model_input", sizes=(len(tokens), actual))
        if array.ndim == 2 and array.shape != targets.shape:
            raise _bad_datum(datum_index, name, "is not shaped like target_tokens")
    return TrainDatum(tokens=tokens, targets=targets, inputs=decoded)


def decode_loss_config(config: Mapping[str, training_pb2.LossConfigValue]) -> dict[str, float]:
    """Raises TrainingError for a value that is not a number; every key of our losses is one."""
    for key, value in config.items():
        if value.WhichOneof("value") != "number":
            raise TrainingError(f"loss_fn_config '{key}' must be a number.", reason="INVALID_LOSS", field=key)
    return {key: value.number for key, value in config.items()}


def decode_lora(lora: policy_pb2.LoraConfig) -> LoraSettings:
    """Absent fields take the defaults of the wire contract."""
    return LoraSettings(rank=lora.rank, **_present(lora, ("alpha", "seed", "use_rslora", *_TRAINED)))


_TRAINED = ("train_attn", "train_mlp", "train_unembed")


def decode_adam(adam: training_pb2.AdamParams) -> AdamSettings:
    """Absent fields take the defaults of the wire contract."""
    names = ("learning_rate", "beta1", "beta2", "eps", "weight_decay", "grad_clip_norm")
    return AdamSettings(**_present(adam, names))


def decode_sample(command: worker_pb2.Sample, *, task_id: int, info: ModelInfo) -> SampleTask:
    """Absent fields take the defaults of the wire contract; without a seed a fresh one is drawn.

    Raises SamplingError for values that are out of range.
    """
    request = command.request
    prompt = _decode_tokens(request.prompt)
    if prompt is None:
        raise SamplingError("this model does not take images", reason="UNSUPPORTED", field="prompt")
    for name in ("topk_prompt_logprobs", "topk_sample_logprobs"):
        if not 0 <= getattr(request, name) <= info.vocab_size:
            raise SamplingError(
                f"{name} must be from 0 to the vocabulary's {info.vocab_size}, got {getattr(request, name)}",
                reason="INVALID_ARGUMENT",
                field=name,
                actual=getattr(request, name),
                limit=info.vocab_size,
            )
    return SampleTask(
        task_id=task_id,
        snapshot_key=command.snapshot_key,
        prompt=prompt,
        num_samples=request.num_samples,
        settings=_decode_sampling_params(request.params, num_prompt=len(prompt), info=info),
        prompt_logprobs=request.prompt_logprobs,
        topk_prompt=request.topk_prompt_logprobs,
        topk_sample=request.topk_sample_logprobs,
        stream=command.stream,
    )


def encode_forward_backward(output: ForwardBackwardOutput) -> operation_pb2.ForwardBackwardResult:
    """Datums in the caller's order, each with its "logprobs"."""
    outputs = [operation_pb2.LossOutput(tensors={"logprobs": encode_tensor(logprobs)}) for logprobs in output.logprobs]
    return operation_pb2.ForwardBackwardResult(outputs=outputs, metrics=output.metrics)


def encode_delta(delta: Delta) -> sampling_pb2.SampleDelta:
    """Next tokens of one sample."""
    return sampling_pb2.SampleDelta(
        sample_index=delta.sample_index,
        tokens=_to_bytes(delta.tokens.astype(np.int32, copy=False)),
        logprobs=_to_bytes(delta.logprobs.astype(np.float32, copy=False)),
        stop_reason=_STOP_REASONS[delta.stop_reason],
    )


def encode_sample(output: SampleOutput) -> sampling_pb2.SampleResponse:
    """Without the snapshot, whose identity the control plane knows."""
    response = sampling_pb2.SampleResponse(
        sequences=[_encode_sequence(sequence) for sequence in output.sequences],
        prompt_cache_hit_tokens=output.prompt_cache_hit_tokens,
    )
    if output.prompt_logprobs is not None:
        response.prompt_logprobs.CopyFrom(encode_tensor(output.prompt_logprobs.astype(np.float32, copy=False)))
    if output.topk_prompt is not None:
        response.topk_prompt.CopyFrom(_encode_topk(output.topk_prompt))
    return response


def encode_ready(info: ModelInfo) -> worker_pb2.Ready:
    """What the worker serves."""
    return worker_pb2.Ready(
        base_model=info.name,
        tokenizer_directory=str(info.tokenizer_directory),
        vocab_size=info.vocab_size,
        max_context_length=info.max_context_length,
        arch=info.arch,
        eos_token_ids=info.eos_token_ids,
        adaptable=info.adaptable,
        accepts_images=info.accepts_images,
    )


def encode_error(error: TrainingError | SamplingError) -> error_pb2.ErrorInfo:
    """Every field that the error has."""
    return error_pb2.ErrorInfo(
        reason=error_pb2.ErrorReason.Value(f"ERROR_REASON_{error.reason}"),
        message=str(error),
        field=error.field,
        datum_index=getattr(error, "datum_index", None),
        expected=error.expected,
        actual=error.actual,
        limit=error.limit,
    )


def _decode_sampling_params(
    params: sampling_pb2.SamplingParams, *, num_prompt: int, info: ModelInfo
) -> SamplingSettings:
    stop_token_ids, stop_texts = frozenset(info.eos_token_ids), ()
    if params.WhichOneof("stop") == "stop_texts":
        stop_texts = tuple(params.stop_texts.texts)
    elif params.WhichOneof("stop") == "stop_token_ids":
        stop_token_ids = frozenset(params.stop_token_ids.ids)
    room = info.max_context_length - num_prompt
    if not params.HasField("max_tokens") and room < 1:
        raise SamplingError(
            f"the prompt of {num_prompt} tokens leaves no room in the context of {info.max_context_length}",
            reason="CONTEXT_LENGTH",
            field="prompt",
            actual=num_prompt + 1,
            limit=info.max_context_length,
        )
    return SamplingSettings(
        max_tokens=params.max_tokens if params.HasField("max_tokens") else room,
        seed=params.seed if params.HasField("seed") else secrets.randbits(64),
        stop_token_ids=stop_token_ids,
        stop_texts=stop_texts,
        logprobs_mode=_LOGPROBS_MODES[params.logprobs_mode],
        **_present(params, ("temperature", "top_k", "top_p")),
    )


def _present(message: Message, names: Iterable[str]) -> dict:
    """Fields that are set, by name; the dataclasses have the contract's defaults for the others."""
    return {name: getattr(message, name) for name in names if message.HasField(name)}


def _decode_tokens(model_input: datum_pb2.ModelInput) -> np.ndarray | None:
    """int64 [T], chunks laid end to end; None when there is an image among them."""
    if any(chunk.WhichOneof("chunk") == "image" for chunk in model_input.chunks):
        return None
    joined = b"".join(chunk.text.tokens for chunk in model_input.chunks)
    return _from_bytes(joined, np.dtype("<i4")).astype(np.int64)


def _decode_field(tensor: tensor_pb2.Tensor, name: str, dtype: np.dtype, *, datum_index: int) -> np.ndarray:
    try:
        array = decode_tensor(tensor)
    except ValueError as error:
        raise _bad_datum(datum_index, name, f"cannot be read: {error}") from error
    if array.dtype.kind != dtype.kind:
        raise _bad_datum(datum_index, name, f"must be {dtype}, got {array.dtype}")
    return array.astype(dtype)


def _bad_datum(
    datum_index: int,
    field: str,
    what: str,
    reason: str = "INVALID_DATUM",
    *,
    sizes: tuple[int, int] | tuple[None, None] = (None, None),
) -> TrainingError:
    """sizes: expected and actual."""
    return TrainingError(
        f"Datum {datum_index}: {field} {what}.",
        reason=reason,
        datum_index=datum_index,
        field=field,
        expected=sizes[0],
        actual=sizes[1],
    )


def _densify(values: np.ndarray, csr: tensor_pb2.CsrIndices, shape: Sequence[int]) -> np.ndarray:
    if len(shape) != 2:
        raise ValueError(f"a sparse tensor has two axes, not {len(shape)}")
    starts, columns = (_from_bytes(data, np.dtype("<i8")) for data in (csr.crow_indices, csr.col_indices))
    lengths = np.diff(starts)
    if len(starts) != shape[0] + 1 or starts[0] != 0 or (lengths < 0).any():
        raise ValueError("crow_indices do not fit the shape")
    if not starts[-1] == len(columns) == len(values):
        raise ValueError("crow_indices, col_indices and the values disagree about the number of values")
    if ((columns < 0) | (columns >= shape[1])).any():
        raise ValueError("col_indices are outside the shape")
    dense = np.zeros(shape, dtype=values.dtype)
    dense[np.repeat(np.arange(shape[0]), lengths), columns] = values
    return dense


def _encode_sequence(sequence: SampledSequence) -> sampling_pb2.SampledSequence:
    message = sampling_pb2.SampledSequence(
        tokens=_to_bytes(sequence.tokens.astype(np.int32, copy=False)),
        logprobs=_to_bytes(sequence.logprobs.astype(np.float32, copy=False)),
        stop_reason=_STOP_REASONS[sequence.stop_reason],
    )
    if sequence.topk is not None:
        message.topk.CopyFrom(_encode_topk(sequence.topk))
    return message


def _encode_topk(topk: TopkLogprobs) -> sampling_pb2.TopkLogprobs:
    return sampling_pb2.TopkLogprobs(
        token_ids=_to_bytes(topk.token_ids.astype(np.int32, copy=False)),
        logprobs=_to_bytes(topk.logprobs.astype(np.float32, copy=False)),
        k=topk.token_ids.shape[1],
    )


def _from_bytes(data: bytes, dtype: np.dtype) -> np.ndarray:
    """Raises ValueError when `data` is not a whole number of elements."""
    return np.frombuffer(data, dtype=dtype)


def _to_bytes(array: np.ndarray) -> bytes:
    return array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()
