"""Sequence ids on the wire: every one is used once, whatever arrives when, and none blocks for ever."""

import time

import grpc
import numpy as np
import pytest

from opentinker_client.wire.v1 import error_pb2, operation_pb2, registry_pb2, training_pb2

SUCCEEDED = operation_pb2.OPERATION_STATE_SUCCEEDED
FAILED = operation_pb2.OPERATION_STATE_FAILED
CANCELLED = operation_pb2.OPERATION_STATE_CANCELLED


def step_of(raw, adapter_id: str) -> int:
    return raw.registry.GetAdapter(registry_pb2.GetAdapterRequest(adapter_id=adapter_id)).adapter.step


def test_a_loop_trains_and_every_answer_has_its_place(raw) -> None:
    adapter_id = raw.adapter()
    losses = []
    for turn in range(3):
        forward = raw.forward_backward(raw.place(adapter_id, 2 * turn + 1), [raw.datum(20), raw.datum(7, seed=1)])
        step = raw.optim_step(raw.place(adapter_id, 2 * turn + 2), 0.01)
        forward, step = raw.ended(forward), raw.ended(step)
        assert forward.state == step.state == SUCCEEDED
        assert (forward.seq_id, step.seq_id) == (2 * turn + 1, 2 * turn + 2)
        assert [list(o.tensors["logprobs"].shape) for o in forward.forward_backward.outputs] == [[20], [7]]
        assert forward.datums_done == 2 and step.optim_step.metrics["step"] == turn + 1
        assert forward.created_at.seconds and forward.started_at.seconds and forward.ended_at.seconds
        losses.append(forward.forward_backward.metrics["loss:sum"])
    assert losses[2] < losses[0]
    assert step_of(raw, adapter_id) == 3


def test_a_retry_is_the_same_operation_and_is_not_done_twice(raw, refused) -> None:
    adapter_id = raw.adapter()
    data = [raw.datum()]
    first = raw.forward_backward(raw.place(adapter_id, 1), data)
    again = raw.forward_backward(raw.place(adapter_id, 1), data)
    assert again.op_id == first.op_id
    step = raw.optim_step(raw.place(adapter_id, 2))
    done = raw.ended(step)
    repeated = raw.optim_step(raw.place(adapter_id, 2))
    assert repeated.op_id == step.op_id and repeated.optim_step == done.optim_step
    assert step_of(raw, adapter_id) == 1
    with refused("SEQUENCE_CONFLICT") as refusal:
        raw.optim_step(raw.place(adapter_id, 2), 0.5)
    assert refusal.code == grpc.StatusCode.ABORTED and refusal.info.field == "seq_id"
    with refused("SEQUENCE_CONFLICT"):
        raw.forward_backward(raw.place(adapter_id, 1), [raw.datum(seed=9)])
    assert raw.ended(raw.optim_step(raw.place(adapter_id, 3))).state == SUCCEEDED


def test_a_retry_may_name_other_given_up_ids(raw) -> None:
    adapter_id = raw.adapter()
    first = raw.optim_step(raw.place(adapter_id, 2, abandoned=[1]))
    assert raw.optim_step(raw.place(adapter_id, 2)).op_id == first.op_id
    assert raw.ended(first).state == SUCCEEDED


def test_ids_that_arrive_in_any_order_run_in_their_own(raw) -> None:
    adapter_id = raw.adapter()
    operations = [raw.optim_step(raw.place(adapter_id, seq_id)) for seq_id in (3, 2, 4, 1)]
    steps = [raw.ended(operation).optim_step.metrics["step"] for operation in operations]
    assert steps == [3, 2, 4, 1]


def test_a_refused_id_is_used_and_its_repetition_gets_the_same_refusal(raw, refused) -> None:
    adapter_id = raw.adapter()
    bad = raw.datum()
    bad.target_tokens.data = np.full(5, 256, "<i8").tobytes()
    for _ in range(2):
        with refused("INVALID_DATUM") as refusal:
            raw.forward_backward(raw.place(adapter_id, 1), [raw.datum(), bad])
        assert (refusal.info.datum_index, refusal.info.field) == (1, "target_tokens")
    assert raw.ended(raw.optim_step(raw.place(adapter_id, 2))).state == SUCCEEDED  # a gap would have failed it


def test_a_stream_that_was_cut_leaves_its_id_free_for_the_whole_call(raw, refused) -> None:
    place = raw.place(raw.adapter(), 1)
    data = [raw.datum(), raw.datum(seed=1)]
    with refused("INVALID_ARGUMENT"):
        raw.training.ForwardBackward(iter(list(raw.stream(place, data, num_datums=3))))
    whole = raw.training.ForwardBackward(iter(list(raw.stream(place, data)))).operation
    assert raw.ended(whole).state == SUCCEEDED


@pytest.mark.parametrize("fault", ["too many", "second header", "nothing", "huge shape"])
def test_a_malformed_stream_uses_its_id_too(raw, refused, fault: str) -> None:
    adapter_id = raw.adapter()
    place = raw.place(adapter_id, 1)
    data = [raw.datum(), raw.datum(seed=1)]
    messages = list(raw.stream(place, data, num_datums={"too many": 1}.get(fault)))
    reason = "INVALID_ARGUMENT"
    if fault == "second header":
        messages.append(messages[0])
    elif fault == "nothing":
        messages, reason = list(raw.stream(place, [])), "INVALID_DATUM"
    elif fault == "huge shape":
        data[1].weights.shape[:] = [2**62, 2**62]
        messages, reason = list(raw.stream(place, data)), "INVALID_DATUM"
    with refused(reason):
        raw.training.ForwardBackward(iter(messages))
    assert raw.ended(raw.optim_step(raw.place(adapter_id, 2))).state == SUCCEEDED  # a gap would have failed it


def test_a_stream_without_header_is_refused(raw, refused) -> None:
    batch = training_pb2.ForwardBackwardRequest(batch=training_pb2.DatumBatch(data=[raw.datum()]))
    for messages in ([], [batch]):
        with refused("INVALID_ARGUMENT"):
            raw.training.ForwardBackward(iter(messages))


def test_given_up_ids_do_not_block_and_cannot_be_used_later(raw, refused) -> None:
    adapter_id = raw.adapter()
    third = raw.optim_step(raw.place(adapter_id, 3, abandoned=[1, 2]))
    assert raw.ended(third).optim_step.metrics["step"] == 1
    with refused("SEQUENCE_CONFLICT"):
        raw.optim_step(raw.place(adapter_id, 2))


def test_giving_up_an_id_that_did_arrive_changes_nothing(raw) -> None:
    adapter_id = raw.adapter()
    first = raw.optim_step(raw.place(adapter_id, 1))
    second = raw.optim_step(raw.place(adapter_id, 2, abandoned=[1]))
    assert raw.ended(second).optim_step.metrics["step"] == 2
    assert raw.ended(first).state == SUCCEEDED


def test_a_missing_id_ends_what_waits_for_it_and_the_adapter_goes_on(raw) -> None:
    adapter_id = raw.adapter()
    started = time.monotonic()
    waiting = [raw.optim_step(raw.place(adapter_id, seq_id)) for seq_id in (2, 4)]
    explanation = raw.operations.ExplainOperation(operation_pb2.ExplainOperationRequest(op_id=waiting[1].op_id))
    assert explanation.missing_seq_id == 1 and explanation.num_ahead_same_adapter == 1
    assert "seq_id 1" in explanation.explanation
    for operation in map(raw.ended, waiting):
        assert operation.state == FAILED
        assert operation.error.reason == error_pb2.ERROR_REASON_SEQUENCE_GAP
        assert operation.error.expected == 1 and operation.error.request_id
    assert 1.9 < time.monotonic() - started < 15.0
    assert raw.ended(raw.optim_step(raw.place(adapter_id, 5))).optim_step.metrics["step"] == 1


def test_a_queued_operation_can_be_cancelled_and_an_ended_one_not(raw) -> None:
    adapter_id = raw.adapter()
    second = raw.optim_step(raw.place(adapter_id, 2))
    cancel = operation_pb2.CancelOperationRequest(op_id=second.op_id)
    assert raw.operations.CancelOperation(cancel).operation.state == CANCELLED
    first = raw.ended(raw.optim_step(raw.place(adapter_id, 1)))
    assert first.state == SUCCEEDED
    cancel = operation_pb2.CancelOperationRequest(op_id=first.op_id)
    assert raw.operations.CancelOperation(cancel).operation.state == SUCCEEDED
    assert raw.ended(raw.optim_step(raw.place(adapter_id, 3))).optim_step.metrics["step"] == 2


def test_a_wait_ends_with_its_time_and_not_before(raw) -> None:
    adapter_id = raw.adapter()
    second = raw.optim_step(raw.place(adapter_id, 2))
    started = time.monotonic()
    assert raw.ended(second, timeout_s=0.3).state == operation_pb2.OPERATION_STATE_QUEUED
    assert time.monotonic() - started > 0.28
    raw.optim_step(raw.place(adapter_id, 1))
    assert raw.ended(second).state == SUCCEEDED


def test_the_answer_to_a_repeated_unload_is_the_first_one(raw, refused) -> None:
    adapter_id = raw.adapter()
    request = training_pb2.UnloadAdapterRequest(sequence=raw.place(adapter_id, 1))
    first = raw.ended(raw.training.UnloadAdapter(request).operation)
    assert first.state == SUCCEEDED
    again = raw.training.UnloadAdapter(request).operation
    assert (again.op_id, again.state) == (first.op_id, SUCCEEDED)
    with refused("SESSION_EXPIRED"):
        raw.optim_step(raw.place(adapter_id, 2))


def test_creation_is_done_once_for_each_key(raw, refused) -> None:
    request = raw.creation()
    first = raw.training.CreateAdapter(request).operation
    assert raw.training.CreateAdapter(request).operation.op_id == first.op_id
    assert raw.ended(first).state == SUCCEEDED
    assert raw.training.CreateAdapter(request).operation.adapter.adapter_id == first.adapter_id
    request.lora.rank = 8
    with refused("SEQUENCE_CONFLICT"):
        raw.training.CreateAdapter(request)


def test_sparse_claims_cost_nothing(raw, refused) -> None:
    """A few bytes must not make the server hold gigabytes."""
    adapter_id = raw.adapter()
    started = time.monotonic()
    for seq_id, key, shape in ((1, "target_tokens", [1, 2**27]), (2, "weights", [1, 2**27])):
        claim = raw.datum(1)
        tensor = getattr(claim, key)
        tensor.data, tensor.shape[:] = b"", shape
        tensor.csr.crow_indices = np.zeros(2, "<i8").tobytes()
        with refused("INVALID_DATUM") as refusal:
            raw.forward_backward(raw.place(adapter_id, seq_id), [claim])
        assert refusal.info.field == key
    assert time.monotonic() - started < 10.0
