"""Values that no setting and no request may have, and what the log says of a request."""

import asyncio
import json
import logging
from pathlib import Path

import numpy as np
import pytest

from opentinker_client.wire.v1 import datum_pb2, policy_pb2, tensor_pb2, training_pb2
from opentinker_server.api.calls import unary
from opentinker_server.config import ConfigError, LoggingSettings, load_config
from opentinker_server.logging_setup import set_up_logging
from opentinker_server.scheduler.errors import ServiceError
from opentinker_server.service.validation import ModelLimits, check_data, check_loss, complete_adam, complete_lora

MODEL = ModelLimits(name="m", vocab_size=256, max_context_length=64, accepts_images=False)
SPEC = check_loss("cross_entropy", {})


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_settings_are_finite(value: str) -> None:
    with pytest.raises(ConfigError, match=r"scheduler\.gap_timeout_s \(from flag\)"):
        load_config(None, overrides={"scheduler.gap_timeout_s": value}, environment={})


@pytest.mark.parametrize("line", ["[model.name]\nx = 1", "[model]\nname = ['a']", "[server]\nport = 2026-12-01"])
def test_a_setting_is_one_plain_value(tmp_path: Path, line: str) -> None:
    file = tmp_path / "server.toml"
    file.write_text(line)
    with pytest.raises(ConfigError, match="must be of type"):
        load_config(file, environment={})


@pytest.mark.parametrize("eps", [0.0, 1e-40])
def test_an_eps_that_is_zero_in_float32_is_refused(eps: float) -> None:
    """Weights without a gradient would become 0 / 0."""
    with pytest.raises(ServiceError, match="eps"):
        complete_adam(training_pb2.AdamParams(eps=eps))
    assert complete_adam(training_pb2.AdamParams(eps=1e-30)).eps == 1e-30


@pytest.mark.parametrize(
    "values",
    [
        {"learning_rate": 1e30},
        {"beta1": 1.0},
        {"beta2": 1 - 1e-12},
        {"weight_decay": 1e30},
        {"learning_rate": 1e3, "weight_decay": 0.1},
    ],
)
def test_an_optimizer_step_that_would_leave_float32_is_refused(values: dict[str, float]) -> None:
    with pytest.raises(ServiceError, match=list(values)[-1]):
        complete_adam(training_pb2.AdamParams(**values))


@pytest.mark.parametrize("alpha", [0.0, 1e39, 1e308, float("nan")])
def test_a_lora_scale_that_would_leave_float32_is_refused(alpha: float) -> None:
    with pytest.raises(ServiceError, match="alpha"):
        complete_lora(policy_pb2.LoraConfig(rank=8, alpha=alpha), max_rank=64, seed=0)


def test_a_loss_configuration_that_would_leave_float32_is_refused() -> None:
    with pytest.raises(ServiceError, match="beta"):
        check_loss("dro", {"beta": training_pb2.LossConfigValue(number=1e308)})


@pytest.mark.parametrize("key", ["weights", "target_tokens", "mask"])
def test_an_extra_of_the_name_of_a_typed_field_is_refused(key: str) -> None:
    datum = sparse_datum(4, 8)
    datum.extras[key].CopyFrom(
        tensor_pb2.Tensor(data=np.ones(4, "<f4").tobytes(), dtype=tensor_pb2.DTYPE_FLOAT32, shape=[4])
    )
    with pytest.raises(ServiceError, match=f"extras holds '{key}'"):
        check_data([datum], SPEC, MODEL)


def sparse_datum(length: int, columns: int) -> datum_pb2.Datum:
    """One stored target a row, at column 0."""
    tokens = np.zeros(length, "<i4").tobytes()
    targets = tensor_pb2.Tensor(
        data=np.ones(length, "<i8").tobytes(), dtype=tensor_pb2.DTYPE_INT64, shape=[length, columns]
    )
    targets.csr.crow_indices = np.arange(length + 1, dtype="<i8").tobytes()
    targets.csr.col_indices = np.zeros(length, "<i8").tobytes()
    chunks = [datum_pb2.Chunk(text=datum_pb2.TextChunk(tokens=tokens))]
    return datum_pb2.Datum(model_input=datum_pb2.ModelInput(chunks=chunks), target_tokens=targets)


def test_sparse_tensors_of_a_call_are_bounded_by_what_they_become() -> None:
    data = [sparse_datum(64, 256) for _ in range(4)]
    needed = 4 * 64 * 256 * 8
    check_data(data, SPEC, MODEL, max_dense_bytes=needed)
    with pytest.raises(ServiceError) as caught:
        check_data(data, SPEC, MODEL, max_dense_bytes=needed - 1)
    assert caught.value.reason == "LIMIT_EXCEEDED"
    assert (caught.value.info.limit, caught.value.info.actual) == (needed - 1, needed)


def test_more_targets_a_row_than_there_are_tokens_are_refused() -> None:
    with pytest.raises(ServiceError) as caught:
        check_data([sparse_datum(4, 256), sparse_datum(4, 257)], SPEC, MODEL)
    assert (caught.value.info.datum_index, caught.value.info.expected, caught.value.info.actual) == (1, 256, 257)


class Context:
    """As much of a gRPC context as a call's start and log line need."""

    def invocation_metadata(self) -> tuple:
        return (("x-request-id", "mine"),)

    def set_trailing_metadata(self, metadata: tuple) -> None:
        self.trailing = dict(metadata)

    def code(self) -> None:
        return None


def test_every_log_line_of_a_request_has_its_id(capsys: pytest.CaptureFixture) -> None:
    """As JSON and as text; outside a request there is none."""
    logger = logging.getLogger("opentinker_server.test")
    root = logging.getLogger("opentinker_server")
    handlers, level, propagate = root.handlers[:], root.level, root.propagate

    class Servicer:
        @unary
        async def Call(self, request: None, context: Context) -> None:
            logger.info("inside", extra={"adapter_id": "a-1"})

    context = Context()
    try:
        set_up_logging(LoggingSettings(json=True))
        logger.info("outside")
        asyncio.run(Servicer().Call(None, context))
        set_up_logging(LoggingSettings())
        asyncio.run(Servicer().Call(None, context))
    finally:
        root.handlers[:], root.propagate = handlers, propagate
        root.setLevel(level)
    outside, inside, text = capsys.readouterr().err.splitlines()
    assert "request_id" not in json.loads(outside)
    entry = json.loads(inside)
    assert (entry["message"], entry["request_id"], entry["adapter_id"]) == ("inside", "mine", "a-1")
    assert text.endswith("adapter_id=a-1 request_id=mine") and context.trailing == {"x-request-id": "mine"}


def test_a_field_that_the_server_does_not_know_is_refused_not_dropped() -> None:
    """As a misspelt one over the raw wire would be."""
    unknown = bytes([0xF8, 0x07, 0x01])  # field 127, a varint
    adam = training_pb2.AdamParams.FromString(training_pb2.AdamParams(beta1=0.5).SerializeToString() + unknown)
    with pytest.raises(ServiceError, match="adam holds a field of number 127"):
        complete_adam(adam)
    lora = policy_pb2.LoraConfig.FromString(policy_pb2.LoraConfig(rank=4).SerializeToString() + unknown)
    with pytest.raises(ServiceError, match="lora holds a field of number 127"):
        complete_lora(lora, max_rank=8, seed=0)
