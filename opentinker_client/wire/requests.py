"""SDK types to protobuf. With `responses.py` the only place that knows both."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from google.protobuf.message import Message

from opentinker_client import types
from opentinker_client.wire.v1 import datum_pb2, policy_pb2, registry_pb2, sampling_pb2, tensor_pb2, training_pb2

AttachAdapterRequest = training_pb2.AttachAdapterRequest
CreateAdapterRequest = training_pb2.CreateAdapterRequest
PolicyRef = policy_pb2.PolicyRef
LoadStateRequest = training_pb2.LoadStateRequest
OptimStepRequest = training_pb2.OptimStepRequest
PublishSnapshotRequest = training_pb2.PublishSnapshotRequest
SaveCheckpointRequest = training_pb2.SaveCheckpointRequest
UnloadAdapterRequest = training_pb2.UnloadAdapterRequest
SequencePlace = training_pb2.Sequence
CreateSamplerRequest = sampling_pb2.CreateSamplerRequest
DeleteSamplerRequest = sampling_pb2.DeleteSamplerRequest
RefreshSamplerRequest = sampling_pb2.RefreshSamplerRequest
StreamSampleRequest = sampling_pb2.StreamSampleRequest
registry = registry_pb2

BATCH_BYTES = 2 * 2**20
_DTYPES = {"float32": tensor_pb2.DTYPE_FLOAT32, "int64": tensor_pb2.DTYPE_INT64}
_FORMATS = {"png": datum_pb2.IMAGE_FORMAT_PNG, "jpeg": datum_pb2.IMAGE_FORMAT_JPEG}
_MODES = {
    "model": sampling_pb2.LOGPROBS_MODE_MODEL,
    "processed": sampling_pb2.LOGPROBS_MODE_PROCESSED,
}


def _little_endian(array: np.ndarray) -> bytes:
    return array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()


def tensor(data: types.TensorData) -> tensor_pb2.Tensor:
    """A typed array."""
    message = tensor_pb2.Tensor(data=_little_endian(data.data), dtype=_DTYPES[data.dtype], shape=data.shape)
    if data.sparse_crow_indices is not None:
        message.csr.crow_indices = _little_endian(data.sparse_crow_indices)
        message.csr.col_indices = _little_endian(data.sparse_col_indices)
    return message


def model_input(value: types.ModelInput) -> datum_pb2.ModelInput:
    """What the model reads."""
    if not isinstance(value, types.ModelInput):
        raise TypeError(f"expected a ModelInput, got {type(value).__name__}; use ModelInput.from_ints(tokens)")
    message = datum_pb2.ModelInput()
    for chunk in value.chunks:
        if isinstance(chunk, types.EncodedTextChunk):
            tokens = np.asarray(chunk.tokens)
            if tokens.size and (tokens.dtype.kind not in "iu" or abs(int(tokens.max())) >= 2**31 or tokens.min() < 0):
                raise ValueError("model_input tokens must be ids from 0 to 2^31 - 1")
            message.chunks.add().text.tokens = tokens.astype("<i4").tobytes()
        else:
            image = datum_pb2.ImageChunk(
                data=chunk.data, format=_FORMATS[chunk.format], expected_tokens=chunk.expected_tokens
            )
            message.chunks.add().image.CopyFrom(image)
    return message


def datum(value: types.Datum, *, loss_fn: str) -> datum_pb2.Datum:
    """One training example. A reinforcement loss without a mask counts every token."""
    message = datum_pb2.Datum(model_input=model_input(value.model_input))
    for key, data in value.loss_fn_inputs.items():
        if key in types.INPUT_DTYPES:
            getattr(message, key).CopyFrom(tensor(data))
        else:
            message.extras[key].CopyFrom(tensor(data))
    if loss_fn != "cross_entropy" and "mask" not in value.loss_fn_inputs and "target_tokens" in value.loss_fn_inputs:
        rows = len(value.loss_fn_inputs["target_tokens"])
        message.mask.CopyFrom(tensor(types.TensorData.from_numpy(np.ones(rows, dtype=np.float32))))
    return message


def forward_backward(
    data: Sequence[types.Datum],
    loss_fn: str,
    config: Mapping[str, float | str] | None,
    *,
    forward_only: bool,
    trained_only: bool = False,
    limits: types.Limits,
) -> tuple[training_pb2.ForwardBackwardHeader, list[training_pb2.ForwardBackwardRequest]]:
    """The header, whose sequence is filled in at submission, and the messages that follow it.

    Raises ValueError when the call is empty or above the server's limits.
    """
    if len(data) == 0:
        raise ValueError("data is empty: forward_backward needs at least one datum")
    if len(data) > limits.max_datums:
        raise ValueError(
            f"data has {len(data)} datums; the server takes {limits.max_datums} in one call, send several calls"
        )
    messages = []
    for index, item in enumerate(data):
        if not isinstance(item, types.Datum):
            raise TypeError(f"data[{index}] is a {type(item).__name__}, not a Datum")
        messages.append(datum(item, loss_fn=loss_fn))
    batches = [
        training_pb2.ForwardBackwardRequest(batch=training_pb2.DatumBatch(data=part)) for part in _batches(messages)
    ]
    sizes = [batch.ByteSize() for batch in batches]
    if sum(sizes) > limits.max_call_bytes:
        raise ValueError(
            f"the call has {sum(sizes)} bytes; the server takes {limits.max_call_bytes}, send several calls"
        )
    if max(sizes) > limits.max_message_bytes:
        raise ValueError(f"a datum has {max(sizes)} bytes; the server takes {limits.max_message_bytes}")
    header = training_pb2.ForwardBackwardHeader(
        loss_fn=loss_fn, forward_only=forward_only, trained_only=trained_only, num_datums=len(data)
    )
    for key, value in (config or {}).items():
        if isinstance(value, str):
            header.loss_fn_config[key].text = value
        else:
            header.loss_fn_config[key].number = float(value)
    return header, batches


def stream(
    header: training_pb2.ForwardBackwardHeader, batches: Sequence[training_pb2.ForwardBackwardRequest]
) -> Iterator[training_pb2.ForwardBackwardRequest]:
    """The messages of a forward_backward: the header, then the datums."""
    yield training_pb2.ForwardBackwardRequest(header=header)
    yield from batches


def _batches(messages: Sequence[datum_pb2.Datum]) -> Iterator[list[datum_pb2.Datum]]:
    """Runs of datums of about BATCH_BYTES; a larger datum is alone."""
    part: list[datum_pb2.Datum] = []
    size = 0
    for message in messages:
        bytes_ = message.ByteSize()
        if part and size + bytes_ > BATCH_BYTES:
            yield part
            part, size = [], 0
        part.append(message)
        size += bytes_
    yield part


def lora_config(value: types.LoraConfig) -> policy_pb2.LoraConfig:
    """How an adapter is built."""
    return policy_pb2.LoraConfig(
        rank=value.rank,
        seed=value.seed,
        train_attn=value.train_attn,
        train_mlp=value.train_mlp,
        train_unembed=value.train_unembed,
        alpha=value.alpha,
        use_rslora=value.use_rslora,
    )


def adam_params(value: types.AdamParams) -> training_pb2.AdamParams:
    """One optimizer step."""
    return training_pb2.AdamParams(
        learning_rate=value.learning_rate,
        beta1=value.beta1,
        beta2=value.beta2,
        eps=value.eps,
        weight_decay=value.weight_decay,
        grad_clip_norm=value.grad_clip_norm,
    )


def sampling_params(value: types.SamplingParams) -> sampling_pb2.SamplingParams:
    """How to generate."""
    if value.logprobs_mode not in _MODES:
        raise ValueError(f"logprobs_mode is {value.logprobs_mode!r}; it must be 'model' or 'processed'")
    message = sampling_pb2.SamplingParams(logprobs_mode=_MODES[value.logprobs_mode])
    for name in ("max_tokens", "seed", "temperature", "top_k", "top_p"):
        _set_number(message, name, getattr(value, name))
    stop = value.stop
    if isinstance(stop, str):
        message.stop_texts.texts.append(stop)
    elif stop is not None:
        rules: list = list(stop)
        if rules and all(isinstance(rule, str) for rule in rules):
            message.stop_texts.texts.extend(rules)
        elif all(isinstance(rule, int | np.integer) for rule in rules):
            message.stop_token_ids.SetInParent()
            for rule in rules:
                if not 0 <= rule < 2**31:
                    raise ValueError(f"stop holds {rule}; token ids are from 0 to 2^31 - 1")
                message.stop_token_ids.ids.append(int(rule))
        else:
            raise TypeError("stop must be a text, a list of texts, or a list of token ids")
    return message


def sample(
    sampler_id: str,
    prompt: types.ModelInput,
    num_samples: int,
    params: types.SamplingParams,
    *,
    prompt_logprobs: bool = False,
    topk_prompt_logprobs: int = 0,
    topk_sample_logprobs: int = 0,
) -> sampling_pb2.SampleRequest:
    """Asks for samples."""
    if not isinstance(params, types.SamplingParams):
        raise TypeError(f"sampling_params must be SamplingParams, got {type(params).__name__}")
    request = sampling_pb2.SampleRequest(
        sampler_id=sampler_id,
        prompt=model_input(prompt),
        params=sampling_params(params),
        prompt_logprobs=prompt_logprobs,
    )
    _set_number(request, "num_samples", num_samples)
    _set_number(request, "topk_prompt_logprobs", topk_prompt_logprobs)
    _set_number(request, "topk_sample_logprobs", topk_sample_logprobs)
    return request


def _set_number(message: Message, name: str, value: float | None) -> None:
    """Sets a field unless the value is None. Raises ValueError or TypeError naming it when it cannot hold the value."""
    if value is not None:
        try:
            setattr(message, name, value)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{name} is {value!r}, which cannot be sent: {error}") from None
