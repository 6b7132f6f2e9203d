"""Protobuf to SDK types. With `requests.py` the only place that knows both."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import numpy as np
from google.protobuf.message import Message

from opentinker_client import types
from opentinker_client.exceptions import APIStatusError, exception_class
from opentinker_client.wire.v1 import (
    error_pb2,
    operation_pb2,
    policy_pb2,
    registry_pb2,
    sampling_pb2,
    session_pb2,
    tensor_pb2,
)

Sampler = sampling_pb2.Sampler
_NUMPY: dict[int, tuple[np.dtype, types.TensorDtype]] = {
    tensor_pb2.DTYPE_FLOAT32: (np.dtype("<f4"), "float32"),
    tensor_pb2.DTYPE_INT64: (np.dtype("<i8"), "int64"),
    tensor_pb2.DTYPE_INT32: (np.dtype("<i4"), "int64"),
}
_STOP_REASONS: dict[int, types.StopReason] = {
    sampling_pb2.STOP_REASON_STOP: "stop",
    sampling_pb2.STOP_REASON_LENGTH: "length",
}
ENDED = (
    operation_pb2.OPERATION_STATE_SUCCEEDED,
    operation_pb2.OPERATION_STATE_FAILED,
    operation_pb2.OPERATION_STATE_CANCELLED,
)


def error(info: error_pb2.ErrorInfo) -> APIStatusError:
    """The exception that a server's error is raised as."""
    reason = (
        error_pb2.ErrorReason.Name(info.reason).removeprefix("ERROR_REASON_")
        if info.reason in error_pb2.ErrorReason.values()
        else "UNSPECIFIED"
    )
    optional = {
        name: getattr(info, name)
        for name in ("datum_index", "expected", "actual", "limit")
        if info.HasField(name)  # type: ignore[arg-type]
    }
    return exception_class(reason)(
        info.message, reason=reason, request_id=info.request_id, field=info.field, **optional
    )


def error_details(serialized: bytes) -> error_pb2.ErrorInfo | None:
    """The ErrorInfo in the trailing metadata of a failed call."""
    for detail in error_pb2.ErrorStatus.FromString(serialized).details:
        info = error_pb2.ErrorInfo()
        if detail.Unpack(info):
            return info
    return None


def _time(message: Message, name: str) -> datetime | None:
    return getattr(message, name).ToDatetime(UTC) if message.HasField(name) else None


def tensor(message: tensor_pb2.Tensor) -> types.TensorData:
    """A typed array."""
    dtype, name = _NUMPY[message.dtype]
    return types.TensorData(data=np.frombuffer(message.data, dtype), dtype=name, shape=tuple(message.shape))


def snapshot(message: policy_pb2.Snapshot) -> types.Snapshot:
    """An immutable version."""
    return types.Snapshot(
        adapter_id=message.adapter_id,
        version=message.version,
        sha256=message.sha256,
        uri=message.uri,
        name=message.name,
        step=message.step,
        base_model=message.base_model,
        size_bytes=message.size_bytes,
        created_at=_time(message, "created_at"),
        expires_at=_time(message, "expires_at"),
        user_metadata=dict(message.user_metadata),
    )


def lora_config(message: policy_pb2.LoraConfig) -> types.LoraConfig:
    """How an adapter is built."""
    return types.LoraConfig(
        rank=message.rank,
        seed=message.seed,
        train_unembed=message.train_unembed,
        train_mlp=message.train_mlp,
        train_attn=message.train_attn,
        alpha=message.alpha,
        use_rslora=message.use_rslora,
    )


def forward_backward(operation: operation_pb2.Operation) -> types.ForwardBackwardOutput:
    """Outputs in the order of the data."""
    result = operation.forward_backward
    return types.ForwardBackwardOutput(
        loss_fn_output_type="ArrayRecord",
        loss_fn_outputs=[{name: tensor(value) for name, value in output.tensors.items()} for output in result.outputs],
        metrics=dict(result.metrics),
    )


def optim_step(operation: operation_pb2.Operation) -> types.OptimStepResponse:
    """Metrics of the step."""
    return types.OptimStepResponse(metrics=dict(operation.optim_step.metrics))


def saved_checkpoint(operation: operation_pb2.Operation) -> types.SaveWeightsResponse:
    """Where it was saved."""
    return types.SaveWeightsResponse(path=operation.checkpoint.uri)


def published(operation: operation_pb2.Operation) -> types.SaveWeightsForSamplerResponse:
    """The new version."""
    return types.SaveWeightsForSamplerResponse(path=operation.snapshot.uri, snapshot=snapshot(operation.snapshot))


def loaded(operation: operation_pb2.Operation) -> types.LoadWeightsResponse:
    """Loaded into the adapter."""
    return types.LoadWeightsResponse(model_id=operation.adapter_id)


def unloaded(operation: operation_pb2.Operation) -> types.UnloadResponse:
    """No longer live."""
    return types.UnloadResponse(model_id=operation.adapter_id)


def adapter_info(message: policy_pb2.Adapter, arch: str) -> types.GetInfoResponse:
    """What an adapter is."""
    return types.GetInfoResponse(
        model_id=message.adapter_id,
        model_data=types.ModelData(arch=arch, model_name=message.base_model, tokenizer_id=message.base_model),
        is_lora=True,
        lora_rank=message.lora.rank,
        model_name=message.base_model,
        lora=lora_config(message.lora),
    )


def _topk(message: sampling_pb2.TopkLogprobs) -> types.TopkLogprobs:
    ids = np.frombuffer(message.token_ids, "<i4").reshape(-1, message.k)
    values = np.frombuffer(message.logprobs, "<f4").reshape(-1, message.k)
    return [
        None if row[0] <= -99999.0 else [(int(i), float(v)) for i, v in zip(id_row, row, strict=True) if v > -99999.0]
        for id_row, row in zip(ids, values, strict=True)
    ]


def sample(message: sampling_pb2.SampleResponse) -> types.SampleResponse:
    """All samples of a call, each with the snapshot that produced it."""
    source = snapshot(message.snapshot) if message.HasField("snapshot") else None
    prompt = None
    if message.HasField("prompt_logprobs"):
        values = np.frombuffer(message.prompt_logprobs.data, "<f4").tolist()
        prompt = [None if math.isnan(value) else value for value in values]
    return types.SampleResponse(
        sequences=[
            types.SampledSequence(
                stop_reason=_STOP_REASONS[sequence.stop_reason],
                tokens=np.frombuffer(sequence.tokens, "<i4").tolist(),
                logprobs=np.frombuffer(sequence.logprobs, "<f4").tolist(),
                snapshot=source,
                topk_logprobs=_topk(sequence.topk) if sequence.HasField("topk") else None,
            )
            for sequence in message.sequences
        ],
        prompt_logprobs=prompt,
        topk_prompt_logprobs=_topk(message.topk_prompt) if message.HasField("topk_prompt") else None,
        snapshot=source,
        prompt_cache_hit_tokens=message.prompt_cache_hit_tokens,
    )


def sample_delta(message: sampling_pb2.SampleDelta) -> types.SampleDelta:
    """Next tokens of a stream."""
    return types.SampleDelta(
        sample_index=message.sample_index,
        tokens=np.frombuffer(message.tokens, "<i4").tolist(),
        logprobs=np.frombuffer(message.logprobs, "<f4").tolist(),
        stop_reason=_STOP_REASONS.get(message.stop_reason),
    )


def capabilities(message: session_pb2.GetServerInfoResponse) -> types.GetServerCapabilitiesResponse:
    """What the server is and offers."""
    return types.GetServerCapabilitiesResponse(
        supported_models=[
            types.SupportedModel(
                model_name=model.model_name,
                max_context_length=model.max_context_length,
                vocab_size=model.vocab_size,
                arch=model.arch,
            )
            for model in message.models
        ],
        server_version=message.server_version,
        limits=types.Limits(
            **{field.name: getattr(message.limits, field.name) for field in message.limits.DESCRIPTOR.fields}
        ),
        loss_fns=list(message.loss_fns),
        session_lease_s=message.session_lease_s,
    )


def training_run(message: policy_pb2.Adapter) -> types.TrainingRun:
    """An adapter with its history."""
    last_used = _time(message, "last_used_at")
    assert last_used is not None
    return types.TrainingRun(
        training_run_id=message.adapter_id,
        base_model=message.base_model,
        model_owner="local",
        is_lora=True,
        last_request_time=last_used,
        lora_rank=message.lora.rank,
        corrupted=message.state == policy_pb2.ADAPTER_STATE_LOST,
        state=policy_pb2.AdapterState.Name(message.state).removeprefix("ADAPTER_STATE_").lower(),
        step=message.step,
        latest_version=message.latest_version,
        created_at=_time(message, "created_at"),
        user_metadata=dict(message.user_metadata) or None,
    )


def cursor(request: registry_pb2.Page, total_count: int) -> types.Cursor:
    """Place of a page in its list."""
    return types.Cursor(offset=request.offset, limit=request.limit, total_count=total_count)


def checkpoint(message: policy_pb2.Checkpoint | policy_pb2.Snapshot) -> types.Checkpoint:
    """A checkpoint (training) or a named snapshot (sampler), as Tinker lists them."""
    training = isinstance(message, policy_pb2.Checkpoint)
    created = _time(message, "created_at")
    assert created is not None
    return types.Checkpoint(
        checkpoint_id=message.uri.split("/", 3)[3],
        checkpoint_type="training" if training else "sampler",
        time=created,
        tinker_path=message.uri,
        size_bytes=message.size_bytes,
        user_metadata=dict(message.user_metadata) or None,
        expires_at=_time(message, "expires_at"),
        step=message.step,
        sha256=message.sha256,
    )


def weights_info(
    message: policy_pb2.Checkpoint | policy_pb2.Snapshot, lora: policy_pb2.LoraConfig
) -> types.WeightsInfoResponse:
    """What a checkpoint or snapshot holds."""
    return types.WeightsInfoResponse(
        path=message.uri,
        checkpoint_type="training" if isinstance(message, policy_pb2.Checkpoint) else "sampler",
        base_model=message.base_model,
        is_lora=True,
        lora_rank=lora.rank,
        step=message.step,
        sha256=message.sha256,
        size_bytes=message.size_bytes,
        train_unembed=lora.train_unembed,
        train_mlp=lora.train_mlp,
        train_attn=lora.train_attn,
    )


def merge_metrics(server: Mapping[str, float], user: Mapping[str, Any], loss: float) -> dict[str, float]:
    """Metrics of a custom loss: the server's, the user's unchanged, `loss:sum` the value of the custom loss."""
    merged = dict(server)
    merged["surrogate_loss:sum"] = merged.pop("loss:sum")
    merged["loss:sum"] = loss
    merged.update(user)
    return merged
