"""Types: conversion, refusals with hints, round trips over the wire."""

import asyncio
import dataclasses
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import opentinker_client as ot
from opentinker_client import exceptions, types
from opentinker_client.transport.retry import with_retries
from opentinker_client.wire import requests, responses
from opentinker_client.wire.v1 import error_pb2, sampling_pb2

LIMITS = types.Limits(
    max_message_bytes=64 << 20, max_call_bytes=1 << 30, max_datums=100, max_rank=8, max_adapters=8, max_num_samples=8
)


@given(hnp.arrays(np.float32, hnp.array_shapes(max_dims=2, max_side=8), elements=st.floats(width=32)))
def test_float_tensors_round_trip(array: np.ndarray) -> None:
    sent = requests.tensor(ot.TensorData.from_numpy(array))
    np.testing.assert_array_equal(responses.tensor(sent).to_numpy(), array)


@given(hnp.arrays(np.int64, hnp.array_shapes(max_dims=2, max_side=8)))
def test_integer_tensors_round_trip(array: np.ndarray) -> None:
    sent = requests.tensor(ot.TensorData.from_numpy(array))
    found = responses.tensor(sent)
    assert found.dtype == "int64"
    np.testing.assert_array_equal(found.to_numpy(), array)


def test_sparse_tensors_are_dense_when_read() -> None:
    data = ot.TensorData(
        data=[5, 6, 7], dtype="int64", shape=(3, 4), sparse_crow_indices=[0, 1, 1, 3], sparse_col_indices=[2, 0, 3]
    )
    np.testing.assert_array_equal(data.to_numpy(), [[0, 0, 5, 0], [0, 0, 0, 0], [6, 0, 0, 7]])
    assert requests.tensor(data).HasField("csr")


def test_torch_tensors_convert_both_ways() -> None:
    torch = pytest.importorskip("torch")
    data = ot.TensorData.from_torch(torch.tensor([[1.5, 2.5]], dtype=torch.bfloat16))
    assert data.dtype == "float32" and data.shape == (1, 2)
    assert torch.equal(data.to_torch(), torch.tensor([[1.5, 2.5]]))


def test_datum_takes_lists_arrays_and_tensors() -> None:
    datum = ot.Datum(
        model_input=ot.ModelInput.from_ints([1, 2]),
        loss_fn_inputs={"target_tokens": [2, 3], "weights": np.array([1, 0]), "extra": np.zeros(2, np.float32)},
    )
    assert datum.loss_fn_inputs["target_tokens"].dtype == "int64"
    assert datum.loss_fn_inputs["weights"].dtype == "float32"


@pytest.mark.parametrize(
    ("inputs", "error", "text"),
    [
        ({"target_tokens": [1.5, 2.0]}, TypeError, "integers"),
        ({"unknown": [1, 2]}, TypeError, "unknown"),
        ({"target_tokens": [[1, 2], [3]]}, ValueError, "target_tokens"),
        ({"weights": ["a", "b"]}, (TypeError, ValueError), "weights"),
        ({"weights": np.array([object(), object()])}, TypeError, "numbers"),
    ],
)
def test_unusable_inputs_are_refused(inputs: dict, error: type, text: str) -> None:
    with pytest.raises(error, match=text):
        ot.Datum(model_input=ot.ModelInput.from_ints([1, 2]), loss_fn_inputs=inputs)


@pytest.mark.parametrize(
    ("call", "hint"),
    [
        (lambda: ot.AdamParams(learing_rate=1), "learning_rate"),
        (lambda: ot.SamplingParams(max_token=1), "max_tokens"),
        (lambda: ot.LoraConfig(rnk=1), "rank"),
        (lambda: ot.ServiceClient(base_ulr="x"), "base_url"),
        (lambda: ot.RegistryClient(url="x"), "base_url"),
    ],
)
def test_unknown_arguments_name_the_nearest(call, hint: str) -> None:
    with pytest.raises(TypeError, match=hint):
        call()


def test_model_input() -> None:
    value = ot.ModelInput.from_ints([1, 2]).append_int(3).append(ot.EncodedTextChunk(tokens=[4]))
    assert value.to_ints() == [1, 2, 3, 4] and value.length == 4 and ot.ModelInput.empty().length == 0
    with pytest.raises(ValueError, match="ids"):
        requests.model_input(ot.ModelInput.from_ints([-1]))
    with pytest.raises(TypeError, match="ModelInput"):
        requests.model_input([1, 2])  # type: ignore[arg-type]
    image = ot.ImageChunk(data=b"x", format="png", expected_tokens=5)
    assert value.append(image).length == 9
    with pytest.raises(ValueError, match="image"):
        value.append(image).to_ints()


def test_a_reinforcement_datum_without_mask_counts_every_token() -> None:
    datum = ot.Datum(
        model_input=ot.ModelInput.from_ints([1, 2]),
        loss_fn_inputs={"target_tokens": [2, 3], "logprobs": [0.0, 0.0], "advantages": [1.0, 0.0]},
    )
    mask = requests.datum(datum, loss_fn="ppo").mask
    np.testing.assert_array_equal(responses.tensor(mask).to_numpy(), [1.0, 1.0])
    assert not requests.datum(datum, loss_fn="cross_entropy").HasField("mask")


def datums(count: int, length: int) -> list[ot.Datum]:
    inputs = {"target_tokens": np.arange(length), "weights": np.ones(length, np.float32)}
    return [ot.Datum(model_input=ot.ModelInput.from_ints(np.arange(length)), loss_fn_inputs=inputs)] * count


def test_calls_are_cut_by_bytes_and_stay_whole() -> None:
    header, batches = requests.forward_backward(
        datums(60, 10_000), "cross_entropy", None, forward_only=False, limits=LIMITS
    )
    assert header.num_datums == 60 == sum(len(b.batch.data) for b in batches)
    assert len(batches) > 3 and max(b.ByteSize() for b in batches) <= requests.BATCH_BYTES + 1024


def test_calls_above_the_limits_are_refused_before_sending() -> None:
    for data, limits, text in (
        ([], LIMITS, "empty"),
        (datums(101, 2), LIMITS, "100"),
        (datums(3, 100), dataclasses.replace(LIMITS, max_call_bytes=1000), "1000"),
        (datums(1, 1000), dataclasses.replace(LIMITS, max_message_bytes=1000), "1000"),
    ):
        with pytest.raises(ValueError, match=text):
            requests.forward_backward(data, "cross_entropy", None, forward_only=False, limits=limits)
    with pytest.raises(TypeError, match=r"data\[0\]"):
        requests.forward_backward([1], "cross_entropy", None, forward_only=False, limits=LIMITS)  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("stop", "kind", "values"),
    [
        (None, None, []),
        ("a", "stop_texts", ["a"]),
        (["a", "b"], "stop_texts", ["a", "b"]),
        ([5, 6], "stop_token_ids", [5, 6]),
        ([], "stop_token_ids", []),
    ],
)
def test_stop_rules(stop: object, kind: str | None, values: list) -> None:
    message = requests.sampling_params(ot.SamplingParams(stop=stop))
    assert message.WhichOneof("stop") == kind
    if kind is not None:
        assert list(getattr(message, kind).texts if kind == "stop_texts" else getattr(message, kind).ids) == values
    with pytest.raises(TypeError, match="stop"):
        requests.sampling_params(ot.SamplingParams(stop=["a", 5]))
    with pytest.raises(ValueError, match="logprobs_mode"):
        requests.sampling_params(ot.SamplingParams(logprobs_mode="other"))  # type: ignore[arg-type]


def test_sample_answers_carry_their_snapshot() -> None:
    message = sampling_pb2.SampleResponse()
    sequence = message.sequences.add(stop_reason=sampling_pb2.STOP_REASON_STOP)
    sequence.tokens = np.array([1, 2], "<i4").tobytes()
    sequence.logprobs = np.array([-0.5, -0.25], "<f4").tobytes()
    message.snapshot.version, message.snapshot.adapter_id = 7, "a"
    response = responses.sample(message)
    assert response.sequences[0].tokens == [1, 2] and response.sequences[0].policy_version == 7
    assert response.sequences[0].tokens_np.dtype == np.int32 and response.policy_version == 7
    message.ClearField("snapshot")
    assert responses.sample(message).policy_version is None


def test_every_reason_has_a_row_and_an_exception_that_pickles() -> None:
    reasons = {name.removeprefix("ERROR_REASON_") for name in error_pb2.ErrorReason.keys()}  # noqa: SIM118
    assert reasons == set(exceptions.TABLE)
    for reason in reasons:
        info = error_pb2.ErrorInfo(
            reason=error_pb2.ErrorReason.Value(f"ERROR_REASON_{reason}"), message="m", datum_index=3, request_id="r"
        )
        error = responses.error(info)
        copy = pickle.loads(pickle.dumps(error))
        assert type(copy) is type(error) is exceptions.exception_class(reason)
        assert (str(copy), copy.reason, copy.datum_index, copy.request_id) == ("m", reason, 3, "r")
        assert isinstance(error, ot.TinkerError)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("top_k", {"top_k": 2**40}),
        ("seed", {"seed": 2**64}),
        ("max_tokens", {"max_tokens": -(2**40)}),
        ("temperature", {"temperature": "hot"}),
        ("stop", {"stop": [2**40]}),
    ],
)
def test_a_sampling_parameter_that_cannot_be_sent_is_named(name: str, values: dict) -> None:
    with pytest.raises((TypeError, ValueError), match=name):
        requests.sampling_params(ot.SamplingParams(**values))


def test_an_exception_with_a_note_is_pickled() -> None:
    error = ot.NotFoundError("gone", reason="NOT_FOUND", request_id="r", field="uri")
    error.add_note("while tidying up")
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.message, copy.field, copy.request_id, copy.status_code) == ("gone", "uri", "r", 404)
    assert copy.__notes__ == ["while tidying up"]


def test_the_time_for_retries_begins_with_the_first_failure() -> None:
    calls = []

    async def send() -> str:
        calls.append(None)
        if len(calls) == 1:
            await asyncio.sleep(0.3)  # longer than the time for retries
            raise ot.APIConnectionError("lost")
        return "answer"

    assert asyncio.run(with_retries(send, seconds=lambda: 0.2)) == "answer"


@pytest.mark.parametrize("name", ["api_key", "project_id"])
def test_what_tinker_takes_and_has_no_meaning_here_is_taken_with_a_warning(name: str) -> None:
    with pytest.warns(UserWarning, match=f"{name} has no effect"):
        ot.ServiceClient(base_url="127.0.0.1:9", **{name: "x"})
