"""Protobuf to arrays and settings, and back."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from opentinker_client.wire.v1 import datum_pb2, error_pb2, policy_pb2, sampling_pb2, tensor_pb2, training_pb2
from opentinker_server.models.base import ModelInfo
from opentinker_server.models.peft_adapter import LoraSettings
from opentinker_server.sampler.base import Delta, SampledSequence, SampleOutput, SamplingError, TopkLogprobs
from opentinker_server.training.errors import TrainingError
from opentinker_server.training.optimizer import AdamSettings
from opentinker_server.training.trainer import ForwardBackwardOutput
from opentinker_server.workers import codec
from opentinker_server.workers.v1 import worker_pb2

SHAPES = hnp.array_shapes(min_dims=0, max_dims=2, min_side=0, max_side=6)
DTYPES = st.sampled_from([np.float32, np.int64, np.int32])


def info(**changes: object) -> ModelInfo:
    values: dict = dict(
        name="m",
        arch="llama",
        vocab_size=256,
        max_context_length=100,
        eos_token_ids=(2, 3),
        num_layers=1,
        hidden_size=8,
        head_dim=8,
        num_attention_heads=1,
        num_kv_heads=1,
        tied_head=False,
        accepts_images=False,
        tokenizer_directory="/t",
        adaptable=("attn",),
    )
    return ModelInfo(**values | changes)


def text(*pieces: list[int]) -> datum_pb2.ModelInput:
    chunks = [
        datum_pb2.Chunk(text=datum_pb2.TextChunk(tokens=np.array(piece, dtype="<i4").tobytes())) for piece in pieces
    ]
    return datum_pb2.ModelInput(chunks=chunks)


@given(DTYPES.flatmap(lambda dtype: hnp.arrays(dtype, SHAPES)))
def test_tensors_survive_the_round_trip(array: np.ndarray) -> None:
    decoded = codec.decode_tensor(codec.encode_tensor(array))
    assert decoded.dtype == array.dtype and decoded.shape == array.shape
    assert decoded.tobytes() == array.tobytes()


@given(hnp.arrays(np.float32, hnp.array_shapes(max_dims=2, max_side=6)).map(lambda array: array[..., ::-1].T))
def test_memory_order_does_not_matter(array: np.ndarray) -> None:
    np.testing.assert_array_equal(codec.decode_tensor(codec.encode_tensor(array)), array)


@given(st.lists(st.integers(0, 2**16 - 1), max_size=20))
def test_bfloat16_is_the_upper_half_of_float32(halves: list[int]) -> None:
    data = np.array(halves, dtype="<u2").tobytes()
    decoded = codec.decode_tensor(tensor_pb2.Tensor(data=data, dtype=tensor_pb2.DTYPE_BFLOAT16, shape=[len(halves)]))
    assert decoded.dtype == np.float32
    assert decoded.view(np.uint32).tolist() == [half << 16 for half in halves]


@given(
    hnp.arrays(np.float32, hnp.array_shapes(min_dims=2, max_dims=2, max_side=7), elements=st.sampled_from([0, 1, -2.5]))
)
def test_sparse_tensors_become_dense(dense: np.ndarray) -> None:
    rows, columns = np.nonzero(dense)
    tensor = codec.encode_tensor(dense[rows, columns])
    tensor.shape[:] = dense.shape
    tensor.csr.crow_indices = np.searchsorted(rows, np.arange(len(dense) + 1)).astype("<i8").tobytes()
    tensor.csr.col_indices = columns.astype("<i8").tobytes()
    np.testing.assert_array_equal(codec.decode_tensor(tensor), dense)


@pytest.mark.parametrize(
    ("crow", "col", "shape"),
    [
        ([0, 1], [0], [2, 2]),
        ([0, 2, 1], [0], [2, 2]),
        ([0, 1, 1], [2], [2, 2]),
        ([0, 1, 1], [-1], [2, 2]),
        ([0, 1, 2], [0, 1], [2, 2]),
        ([1, 1, 1], [0], [2, 2]),
        ([0, 1], [0], [2]),
        ([], [0], [2, 2]),
    ],
)
def test_sparse_tensors_that_do_not_add_up_are_refused(crow: list[int], col: list[int], shape: list[int]) -> None:
    tensor = codec.encode_tensor(np.ones(1, np.float32))
    tensor.shape[:] = shape
    tensor.csr.crow_indices = np.array(crow, dtype="<i8").tobytes()
    tensor.csr.col_indices = np.array(col, dtype="<i8").tobytes()
    with pytest.raises(ValueError):
        codec.decode_tensor(tensor)


def test_tensors_of_wrong_size_or_without_dtype_are_refused() -> None:
    whole = tensor_pb2.Tensor(data=b"\0" * 8, dtype=tensor_pb2.DTYPE_FLOAT32, shape=[2])
    assert codec.decode_tensor(whole).tolist() == [0, 0]
    for change in (dict(data=b"\0" * 7), dict(shape=[3]), dict(shape=[-1]), dict(dtype=0)):
        values = dict(data=whole.data, dtype=whole.dtype, shape=whole.shape) | change
        with pytest.raises(ValueError):
            codec.decode_tensor(tensor_pb2.Tensor(**values))


@given(st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=5), min_size=1, max_size=4).filter(any))
def test_chunks_are_laid_end_to_end(pieces: list[list[int]]) -> None:
    tokens = [token for piece in pieces for token in piece]
    targets = codec.encode_tensor(np.array(tokens, dtype=np.int64))
    datum = datum_pb2.Datum(model_input=text(*pieces), target_tokens=targets)
    decoded = codec.decode_datum(datum, datum_index=0)
    assert decoded.tokens.dtype == decoded.targets.dtype == np.int64
    assert decoded.tokens.tolist() == decoded.targets.tolist() == tokens
    assert decoded.inputs == {}


def test_datum_has_the_inputs_that_are_present_extras_included() -> None:
    datum = datum_pb2.Datum(
        model_input=text([4, 5]),
        target_tokens=codec.encode_tensor(np.array([[1, 2], [3, 4]], np.int32)),
        weights=codec.encode_tensor(np.array([[0.5, 1], [-1, 0]], np.float32)),
        mask=codec.encode_tensor(np.array([0, 1], np.float32)),
        extras={"sequence_ratio_mask": codec.encode_tensor(np.array([1, 1], np.float32))},
    )
    decoded = codec.decode_datum(datum, datum_index=0)
    assert decoded.targets.dtype == np.int64 and decoded.targets.tolist() == [[1, 2], [3, 4]]
    assert {name: array.tolist() for name, array in decoded.inputs.items()} == {
        "weights": [[0.5, 1], [-1, 0]],
        "mask": [0, 1],
        "sequence_ratio_mask": [1, 1],
    }
    assert all(array.dtype == np.float32 for array in decoded.inputs.values())


@pytest.mark.parametrize(
    ("field", "array", "reason"),
    [
        ("weights", np.ones(3, np.float32), "INVALID_DATUM"),
        ("weights", np.ones((2, 2), np.float32), "INVALID_DATUM"),
        ("weights", np.float32(1), "INVALID_DATUM"),
        ("mask", np.ones(2, np.int64), "INVALID_DATUM"),
        ("target_tokens", np.ones(2, np.float32), "INVALID_DATUM"),
        ("target_tokens", np.ones((2, 1, 1), np.int64), "INVALID_DATUM"),
    ],
)
def test_malformed_datum_is_named(field: str, array: np.ndarray, reason: str) -> None:
    datum = datum_pb2.Datum(model_input=text([4, 5]), target_tokens=codec.encode_tensor(np.array([5, 6])))
    getattr(datum, field).CopyFrom(codec.encode_tensor(np.asarray(array)))
    with pytest.raises(TrainingError) as caught:
        codec.decode_datum(datum, datum_index=7)
    assert (caught.value.reason, caught.value.datum_index, caught.value.field) == (reason, 7, field)


def test_absent_settings_take_the_defaults_of_the_contract() -> None:
    assert codec.decode_adam(training_pb2.AdamParams()) == AdamSettings(
        learning_rate=1e-4, beta1=0.9, beta2=0.95, eps=1e-12, weight_decay=0.0, grad_clip_norm=0.0
    )
    zero = training_pb2.AdamParams(learning_rate=0, beta1=0, beta2=0, eps=0, weight_decay=0, grad_clip_norm=0)
    assert codec.decode_adam(zero) == AdamSettings(learning_rate=0, beta1=0, beta2=0, eps=0)
    assert codec.decode_lora(policy_pb2.LoraConfig(rank=8)) == LoraSettings(
        rank=8, alpha=32.0, seed=0, train_attn=True, train_mlp=True, train_unembed=True, use_rslora=False
    )
    changed = policy_pb2.LoraConfig(rank=8, seed=5, train_unembed=False, alpha=4, use_rslora=True)
    assert codec.decode_lora(changed) == LoraSettings(rank=8, alpha=4, seed=5, train_unembed=False, use_rslora=True)


def decode_sample(**request: object):
    command = worker_pb2.Sample(
        snapshot_key="k",
        request=sampling_pb2.SampleRequest(**dict(prompt=text([1, 2, 4]), num_samples=2) | request),
        stream=True,
    )
    return codec.decode_sample(command, task_id=5, info=info())


def test_sampling_defaults_are_those_of_the_contract() -> None:
    task = decode_sample()
    assert (task.task_id, task.snapshot_key, task.num_samples, task.stream) == (5, "k", 2, True)
    assert task.prompt.dtype == np.int64 and task.prompt.tolist() == [1, 2, 4]
    settings = task.settings
    assert (settings.max_tokens, settings.temperature, settings.top_k, settings.top_p) == (97, 1.0, -1, 1.0)
    assert settings.stop_token_ids == {2, 3} and settings.stop_texts == () and settings.logprobs_mode == "model"
    assert settings.seed != decode_sample().settings.seed


def test_sampling_settings_are_taken_as_given() -> None:
    params = sampling_pb2.SamplingParams(
        max_tokens=4,
        seed=2**64 - 1,
        temperature=0,
        top_k=3,
        top_p=0.5,
        logprobs_mode=sampling_pb2.LOGPROBS_MODE_PROCESSED,
    )
    task = decode_sample(params=params, prompt_logprobs=True, topk_prompt_logprobs=2, topk_sample_logprobs=3)
    assert (task.prompt_logprobs, task.topk_prompt, task.topk_sample) == (True, 2, 3)
    settings = task.settings
    assert (settings.max_tokens, settings.seed, settings.temperature) == (4, 2**64 - 1, 0.0)
    assert (settings.top_k, settings.top_p, settings.logprobs_mode) == (3, 0.5, "processed")


def test_stop_rules_replace_or_join_the_end_ids() -> None:
    texts = sampling_pb2.SamplingParams(stop_texts=sampling_pb2.StopTexts(texts=["END"]))
    assert decode_sample(params=texts).settings.stop_texts == ("END",)
    assert decode_sample(params=texts).settings.stop_token_ids == {2, 3}
    ids = sampling_pb2.SamplingParams(stop_token_ids=sampling_pb2.StopTokenIds(ids=[9]))
    assert decode_sample(params=ids).settings.stop_token_ids == {9}
    none = sampling_pb2.SamplingParams(stop_token_ids=sampling_pb2.StopTokenIds())
    assert decode_sample(params=none).settings.stop_token_ids == frozenset()


def test_prompt_that_fills_the_context_is_refused_with_the_numbers() -> None:
    with pytest.raises(SamplingError) as caught:
        decode_sample(prompt=text([1] * 100))
    assert (caught.value.reason, caught.value.actual, caught.value.limit) == ("CONTEXT_LENGTH", 101, 100)


@pytest.mark.parametrize("name", ["topk_prompt_logprobs", "topk_sample_logprobs"])
@pytest.mark.parametrize("k", [-1, 257])
def test_more_likely_tokens_than_there_are_tokens_are_refused(name: str, k: int) -> None:
    with pytest.raises(SamplingError) as caught:
        decode_sample(**{name: k})
    assert (caught.value.field, caught.value.actual, caught.value.limit) == (name, k, 256)


def test_loss_configuration_is_numbers() -> None:
    assert codec.decode_loss_config({"beta": training_pb2.LossConfigValue(number=0.5)}) == {"beta": 0.5}
    with pytest.raises(TrainingError) as caught:
        codec.decode_loss_config({"beta": training_pb2.LossConfigValue(text="high")})
    assert (caught.value.reason, caught.value.field) == ("INVALID_LOSS", "beta")


def test_results_keep_shapes_bits_and_order() -> None:
    logprobs = [np.array([-0.5, -np.inf], np.float32), np.array([[-1, -2]], np.float32)]
    output = ForwardBackwardOutput(logprobs=logprobs, losses=[1.0, 2.0], metrics={"loss:sum": 3.0})
    message = codec.encode_forward_backward(output)
    decoded = [codec.decode_tensor(item.tensors["logprobs"]) for item in message.outputs]
    assert [array.shape for array in decoded] == [(2,), (1, 2)]
    assert all(np.array_equal(one, other) for one, other in zip(decoded, logprobs, strict=True))
    assert dict(message.metrics) == {"loss:sum": 3.0}


def test_samples_keep_every_part() -> None:
    topk = TopkLogprobs(token_ids=np.array([[4, 2]], np.int32), logprobs=np.array([[-0.1, -3]], np.float32))
    tokens, logprobs = np.array([4], np.int32), np.array([-0.1], np.float32)
    sequence = SampledSequence(tokens=tokens, logprobs=logprobs, stop_reason="stop", topk=topk)
    prompt_logprobs = np.array([np.nan, -2], np.float32)
    output = SampleOutput(
        sequences=[sequence, SampledSequence(tokens=tokens, logprobs=logprobs, stop_reason="length")],
        prompt_logprobs=prompt_logprobs,
        topk_prompt=topk,
        prompt_cache_hit_tokens=3,
    )
    message = codec.encode_sample(output)
    first, second = message.sequences
    assert first.tokens == tokens.tobytes() and first.logprobs == logprobs.tobytes()
    assert (first.stop_reason, second.stop_reason) == (sampling_pb2.STOP_REASON_STOP, sampling_pb2.STOP_REASON_LENGTH)
    assert first.topk.k == 2 and first.topk.token_ids == topk.token_ids.tobytes() and not second.HasField("topk")
    assert message.topk_prompt.logprobs == topk.logprobs.tobytes()
    np.testing.assert_array_equal(codec.decode_tensor(message.prompt_logprobs), prompt_logprobs)
    assert message.prompt_cache_hit_tokens == 3
    bare = codec.encode_sample(SampleOutput(sequences=[sequence]))
    assert not bare.HasField("prompt_logprobs") and not bare.HasField("topk_prompt") and not bare.HasField("snapshot")


def test_delta_keeps_every_part() -> None:
    tokens, logprobs = np.array([4, 5], np.int32), np.array([-0.1, -2], np.float32)
    message = codec.encode_delta(Delta(task_id=1, sample_index=3, tokens=tokens, logprobs=logprobs))
    assert message == sampling_pb2.SampleDelta(sample_index=3, tokens=tokens.tobytes(), logprobs=logprobs.tobytes())


def test_errors_keep_every_part() -> None:
    training = TrainingError("m", reason="INVALID_DATUM", datum_index=0, field="mask", expected=0, actual=3)
    assert codec.encode_error(training) == error_pb2.ErrorInfo(
        reason=error_pb2.ERROR_REASON_INVALID_DATUM, message="m", datum_index=0, field="mask", expected=0, actual=3
    )
    sampling = SamplingError("m", reason="LIMIT_EXCEEDED", limit=9)
    message = codec.encode_error(sampling)
    assert message.limit == 9 and not message.HasField("datum_index") and not message.HasField("actual")
