"""Validation refuses with its own error, or accepts; nothing else, whatever the bytes."""

import contextlib
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from opentinker_client.wire.v1 import datum_pb2, policy_pb2, tensor_pb2, training_pb2
from opentinker_server.scheduler.errors import ServiceError
from opentinker_server.service.validation import (
    ModelLimits,
    array,
    check_data,
    check_loss,
    complete_adam,
    complete_lora,
)

MODEL = ModelLimits(name="m", vocab_size=256, max_context_length=64, accepts_images=False)
SPEC = check_loss("cross_entropy", {})

tensors = st.builds(
    tensor_pb2.Tensor,
    data=st.binary(max_size=64),
    dtype=st.integers(0, 6),
    shape=st.lists(st.integers(-2, 2**40), max_size=3),
    csr=st.none() | st.builds(tensor_pb2.CsrIndices, crow_indices=st.binary(max_size=40), col_indices=st.binary()),
)
data = st.builds(
    lambda tokens, image, **fields: datum_pb2.Datum(
        model_input=datum_pb2.ModelInput(
            chunks=[datum_pb2.Chunk(text=datum_pb2.TextChunk(tokens=t)) for t in tokens]
            + ([datum_pb2.Chunk(image=datum_pb2.ImageChunk(data=b"x"))] if image else [])
        ),
        **{key: value for key, value in fields.items() if value is not None},
    ),
    tokens=st.lists(st.binary(max_size=40), max_size=3),
    image=st.booleans(),
    target_tokens=st.none() | tensors,
    weights=st.none() | tensors,
    mask=st.none() | tensors,
    extras=st.none() | st.dictionaries(st.text(max_size=5), tensors, max_size=2),
)


@given(st.lists(data, max_size=3))
def test_random_datums_are_refused_or_accepted(batch: list[datum_pb2.Datum]) -> None:
    with contextlib.suppress(ServiceError):
        check_data(batch, SPEC, MODEL)


def sparse(rows: list[int], columns: list[int], shape: tuple[int, int]) -> tensor_pb2.Tensor:
    message = tensor_pb2.Tensor(
        data=np.arange(1, len(columns) + 1, dtype="<f4").tobytes(), dtype=tensor_pb2.DTYPE_FLOAT32, shape=shape
    )
    message.csr.crow_indices = np.array(rows, "<i8").tobytes()
    message.csr.col_indices = np.array(columns, "<i8").tobytes()
    return message


def test_sparse_tensors_are_read_or_refused() -> None:
    found = array(sparse([0, 1, 1, 3], [2, 0, 1], (3, 4)), key="weights")
    np.testing.assert_array_equal(found, [[0, 0, 1, 0], [0, 0, 0, 0], [2, 3, 0, 0]])
    for rows, columns, shape in (
        ([0, 1], [2, 0, 1], (3, 4)),
        ([0, 2, 1, 3], [2, 0, 1], (3, 4)),
        ([0, 1, 1, 3], [2, 0, 4], (3, 4)),
        ([0, 1, 1, 3], [2, 0, -1], (3, 4)),
        ([0, 1, 1, 3], [2, 0, 1], (2**20, 2**20)),
    ):
        with pytest.raises(ServiceError, match="weights"):
            array(sparse(rows, columns, shape), key="weights")


@pytest.mark.parametrize(
    "fields",
    [
        {"learning_rate": math.nan},
        {"learning_rate": math.inf},
        {"learning_rate": 1e38},
        {"beta1": 1.0},
        {"beta2": -0.1},
        {"eps": -1e-9},
        {"weight_decay": -1},
        {"grad_clip_norm": math.inf},
    ],
)
def test_adam_fields_have_bounds(fields: dict[str, float]) -> None:
    with pytest.raises(ServiceError, match=next(iter(fields))):
        complete_adam(training_pb2.AdamParams(**fields))


def test_absent_adam_fields_take_the_documented_defaults() -> None:
    full = complete_adam(training_pb2.AdamParams(learning_rate=0.0))
    assert (full.learning_rate, full.beta1, full.beta2, full.eps) == (0.0, 0.9, 0.95, 1e-12)


@pytest.mark.parametrize(
    "fields", [{"rank": 0}, {"rank": 9}, {"rank": 4, "alpha": 0.0}, {"rank": 4, "alpha": math.nan}]
)
def test_lora_fields_have_bounds(fields: dict[str, float]) -> None:
    with pytest.raises(ServiceError, match=list(fields)[-1]):
        complete_lora(policy_pb2.LoraConfig(**fields), max_rank=8, seed=1)


def test_loss_configuration_is_checked() -> None:
    def value(number: float) -> training_pb2.LossConfigValue:
        return training_pb2.LossConfigValue(number=number)

    assert check_loss("ppo", {"clip_low_threshold": value(0.5)}).name == "ppo"
    for loss_fn, config in (
        ("pp0", {}),
        ("ppo", {"clip_lo": value(1)}),
        ("ppo", {"clip_low_threshold": value(math.nan)}),
        ("ppo", {"clip_low_threshold": value(-1)}),
        ("ppo", {"clip_low_threshold": value(1.3)}),  # above the default upper bound
        ("ppo", {"mask_ratio_low": value(3), "mask_ratio_high": value(2)}),
        ("importance_sampling", {"truncate_ratio": value(-1)}),
        ("dro", {"beta": training_pb2.LossConfigValue(text="much")}),
    ):
        with pytest.raises(ServiceError):
            check_loss(loss_fn, config)


def test_clip_bounds_of_tokens_are_ratios_in_order() -> None:
    def floats(values: list[float]) -> tensor_pb2.Tensor:
        data = np.array(values, "<f4").tobytes()
        return tensor_pb2.Tensor(data=data, dtype=tensor_pb2.DTYPE_FLOAT32, shape=[len(values)])

    def check(loss_fn: str, **bounds: list[float]) -> None:
        datum = datum_pb2.Datum(
            model_input=datum_pb2.ModelInput(
                chunks=[datum_pb2.Chunk(text=datum_pb2.TextChunk(tokens=np.array([1, 2], "<i4").tobytes()))]
            ),
            target_tokens=tensor_pb2.Tensor(
                data=np.array([2, 3], "<i8").tobytes(), dtype=tensor_pb2.DTYPE_INT64, shape=[2]
            ),
            **{key: floats([1.0, 1.0]) for key in ("logprobs", "advantages", "mask")},
            extras={key: floats(values) for key, values in bounds.items()},
        )
        check_data([datum], check_loss(loss_fn, {}), MODEL)

    check("ppo", clip_low=[0.8, 1.0], clip_high=[1.2, 1.0])
    check("cispo", clip_high=[4.0, 0.0])
    for loss_fn, bounds, text in (
        ("ppo", {"clip_low": [0.8, -0.1]}, "clip_low is an absolute ratio, not -0.1 at index 1"),
        ("ppo", {"clip_low": [0.8, 1.3], "clip_high": [1.2, 1.2]}, "clip_low 1.3 is above clip_high 1.2 at index 1"),
        ("ppo", {"clip_high": [1.2, math.inf]}, "not finite at index 1"),
        ("ppo", {"clip_high": [1.2]}, "clip_high has shape"),
        ("gspo", {"clip_high": [1.2, 1.2]}, "unknown key 'clip_high'"),
    ):
        with pytest.raises(ServiceError, match=text):
            check(loss_fn, **bounds)
