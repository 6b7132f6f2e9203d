"""A real worker process carries out every command."""

import asyncio
import json
import os
import re
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from opentinker_client.wire.v1 import datum_pb2, error_pb2, sampling_pb2
from opentinker_server.backends.base import WorkerError
from opentinker_server.workers.v1 import worker_pb2

SHA256 = re.compile("[0-9a-f]{64}")


def error_of(driver, command: worker_pb2.WorkerCommand) -> error_pb2.ErrorInfo:
    with pytest.raises(WorkerError) as caught:
        driver.call(command)
    return caught.value.error_info


def reason_of(driver, command: worker_pb2.WorkerCommand) -> str:
    return error_pb2.ErrorReason.Name(error_of(driver, command).reason).removeprefix("ERROR_REASON_")


def tokens_of(sequence: sampling_pb2.SampledSequence) -> list[int]:
    return np.frombuffer(sequence.tokens, "<i4").tolist()


def model_logprobs(directory: Path, tokens: list[int]) -> np.ndarray:
    """Of each token given those before it, by stock transformers."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0]
    return torch.log_softmax(logits, -1)[range(len(tokens) - 1), tokens[1:]].numpy()


def directory(tmp_path: Path, name: str) -> str:
    path = tmp_path / name
    path.mkdir()
    return str(path)


def test_ready_describes_the_model(driver, t0_dir) -> None:
    ready = driver.worker.ready
    assert ready.base_model == t0_dir.name
    assert (ready.vocab_size, ready.max_context_length, ready.arch) == (256, 1024, "llama")
    assert Path(ready.tokenizer_directory, "tokenizer.json").is_file()
    assert list(ready.adaptable) == ["attn", "mlp", "unembed"]


def test_fresh_adapter_scores_as_stock_transformers_does(driver, t0_dir) -> None:
    tokens = [11, 12, 13, 14, 200, 7]
    logprobs = driver.logprobs(driver.new_adapter(), tokens)
    np.testing.assert_allclose(logprobs, model_logprobs(t0_dir, tokens), atol=1e-5)


def test_forward_backward_then_step_trains(driver) -> None:
    adapter_id = driver.new_adapter()
    data = [driver.datum([1, 2, 3, 4], weights=[0.5, 1.0, -0.25]), driver.datum([9, 8])]
    reply = driver.call(driver.forward_backward(adapter_id, data))
    result = reply.forward_backward
    first, second = (np.frombuffer(output.tensors["logprobs"].data, np.float32) for output in result.outputs)
    assert first.shape == (3,) and second.shape == (1,)
    expected = -(np.dot(first, [0.5, 1.0, -0.25]) + second.sum())
    assert result.metrics["loss:sum"] == pytest.approx(expected, rel=1e-5)
    assert reply.step == 0
    stepped = driver.call(driver.optim_step(adapter_id, learning_rate=0.01))
    assert stepped.step == 1 and stepped.optim_step.metrics["step"] == 1
    assert stepped.optim_step.metrics["grad_norm"] > 0
    assert not np.array_equal(driver.logprobs(adapter_id, [1, 2, 3, 4]), first)


def test_commands_of_an_adapter_run_in_the_order_sent(driver, tmp_path) -> None:
    adapter_id = driver.new_adapter()
    data = [driver.datum(range(60)) for _ in range(8)]
    commands = []
    for _ in range(3):
        commands += [driver.forward_backward(adapter_id, data), driver.optim_step(adapter_id)]
    save = worker_pb2.SaveState(adapter_id=adapter_id, directory=directory(tmp_path, "state"))
    commands.append(worker_pb2.WorkerCommand(save_state=save))

    async def send_all() -> list[worker_pb2.WorkerReply]:
        return await asyncio.gather(*map(driver.worker.call, commands))

    replies = driver.run(send_all())
    assert [reply.step for reply in replies] == [0, 1, 1, 2, 2, 3, 3]


def test_sampling_from_a_snapshot_agrees_with_the_trainer(driver) -> None:
    adapter_id = driver.trained_adapter()
    saved = driver.publish(adapter_id, "agree")
    assert SHA256.fullmatch(saved.sha256) and saved.size_bytes == 0
    prompt = [5, 6, 7]
    (sequence,) = driver.call(driver.sample(prompt, key="agree", temperature=1.0, seed=3)).sample.sequences
    logprobs = driver.logprobs(adapter_id, prompt + tokens_of(sequence))[len(prompt) - 1 :]
    np.testing.assert_allclose(np.frombuffer(sequence.logprobs, np.float32), logprobs, atol=1e-4)
    (base,) = driver.call(driver.sample(prompt, temperature=1.0, seed=3)).sample.sequences
    assert np.abs(np.frombuffer(base.logprobs, np.float32)[0] - logprobs[0]) > 1e-4


def test_snapshot_does_not_follow_the_adapter(driver) -> None:
    adapter_id = driver.trained_adapter()
    driver.publish(adapter_id, "fixed")
    command = dict(key="fixed", temperature=1.0, seed=9, max_tokens=4)
    before = driver.call(driver.sample([5], **command)).sample
    driver.call(driver.forward_backward(adapter_id, [driver.datum(range(8))]))
    driver.call(driver.optim_step(adapter_id, learning_rate=0.1))
    assert driver.call(driver.sample([5], **command)).sample == before


def test_streamed_deltas_add_up_to_the_answer(driver) -> None:
    async def stream() -> list[worker_pb2.WorkerReply]:
        return [
            reply async for reply in driver.worker.stream(driver.sample([1, 2], stream=True, num_samples=2, seed=1))
        ]

    *deltas, last = driver.run(stream())
    assert all(reply.WhichOneof("reply") == "sample_delta" and not reply.final for reply in deltas)
    assert last.final and len(last.sample.sequences) == 2
    for index, sequence in enumerate(last.sample.sequences):
        own = [reply.sample_delta for reply in deltas if reply.sample_delta.sample_index == index]
        assert b"".join(delta.tokens for delta in own) == sequence.tokens
        assert b"".join(delta.logprobs for delta in own) == sequence.logprobs
        assert [delta.stop_reason for delta in own[:-1]] == [0] * 7
        assert own[-1].stop_reason == sequence.stop_reason == sampling_pb2.STOP_REASON_LENGTH


def test_save_and_load_restore_weights_and_optimizer(driver, tmp_path) -> None:
    adapter_id = driver.trained_adapter(steps=2)
    path = directory(tmp_path, "state")
    reply = driver.call(
        worker_pb2.WorkerCommand(save_state=worker_pb2.SaveState(adapter_id=adapter_id, directory=path))
    )
    assert SHA256.fullmatch(reply.saved.sha256)
    assert reply.saved.size_bytes == sum(file.stat().st_size for file in Path(path).iterdir())
    tokens = [3, 1, 4, 1, 5]
    at_save = driver.logprobs(adapter_id, tokens)

    def continue_training(name: str) -> np.ndarray:
        driver.call(driver.forward_backward(name, [driver.datum(range(8))]))
        assert driver.call(driver.optim_step(name, learning_rate=0.02)).step == 3
        return driver.logprobs(name, tokens)

    went_on = continue_training(adapter_id)
    load = worker_pb2.LoadState(adapter_id=adapter_id, directory=path, with_optimizer=True)
    assert driver.call(worker_pb2.WorkerCommand(load_state=load)).step == 2
    assert np.array_equal(driver.logprobs(adapter_id, tokens), at_save)
    assert np.array_equal(continue_training(adapter_id), went_on)
    fork = driver.new_adapter(directory=path, with_optimizer=True)
    assert np.array_equal(continue_training(fork), went_on)
    load.with_optimizer = False
    assert driver.call(worker_pb2.WorkerCommand(load_state=load)).step == 0
    assert np.array_equal(driver.logprobs(adapter_id, tokens), at_save)


def test_saved_snapshot_is_loaded_only_with_its_hash(driver, tmp_path) -> None:
    adapter_id = driver.trained_adapter()
    path = directory(tmp_path, "snapshot")
    saved = driver.publish(adapter_id, "on-disk", path)
    assert saved.size_bytes == sum(file.stat().st_size for file in Path(path).iterdir())
    assert saved.sha256 == driver.publish(adapter_id, "in-memory").sha256
    wrong = worker_pb2.LoadSnapshot(snapshot_key="loaded", directory=path, sha256="0" * 64)
    assert reason_of(driver, worker_pb2.WorkerCommand(load_snapshot=wrong)) == "CORRUPT_DATA"
    assert reason_of(driver, driver.sample([1], key="loaded")) == "NOT_FOUND"
    right = worker_pb2.LoadSnapshot(snapshot_key="loaded", directory=path, sha256=saved.sha256)
    driver.call(worker_pb2.WorkerCommand(load_snapshot=right))
    answers = [driver.call(driver.sample([1], key=key, seed=1)).sample for key in ("on-disk", "loaded", "in-memory")]
    assert answers[0] == answers[1] == answers[2]


def test_dropped_snapshot_is_unknown_and_keys_are_never_reused(driver) -> None:
    adapter_id = driver.trained_adapter()
    driver.publish(adapter_id, "dropped")
    again = worker_pb2.PublishSnapshot(adapter_id=adapter_id, snapshot_key="dropped")
    assert reason_of(driver, worker_pb2.WorkerCommand(publish_snapshot=again)) == "ALREADY_EXISTS"
    driver.call(worker_pb2.WorkerCommand(drop_snapshot=worker_pb2.DropSnapshot(snapshot_key="dropped")))
    assert reason_of(driver, driver.sample([1], key="dropped")) == "NOT_FOUND"


def test_merged_export_is_a_plain_model_with_the_adapters_logprobs(driver, tmp_path) -> None:
    adapter_id = driver.trained_adapter()
    source, target = directory(tmp_path, "snapshot"), directory(tmp_path, "merged")
    driver.publish(adapter_id, "exported", source)
    export = worker_pb2.ExportMerged(source_directory=source, target_directory=target)
    driver.call(worker_pb2.WorkerCommand(export_merged=export))
    tokens = [21, 22, 23, 24]
    np.testing.assert_allclose(driver.logprobs(adapter_id, tokens), model_logprobs(Path(target), tokens), atol=1e-4)


def test_refusals_name_what_is_wrong_and_the_worker_goes_on(driver) -> None:
    adapter_id = driver.new_adapter()
    good, short = driver.datum([1, 2, 3]), driver.datum([1, 2, 3])
    short.target_tokens.CopyFrom(driver.datum([1, 2]).target_tokens)
    error = error_of(driver, driver.forward_backward(adapter_id, [good, short]))
    assert error.reason == error_pb2.ERROR_REASON_INVALID_DATUM
    assert (error.datum_index, error.field, error.expected, error.actual) == (1, "target_tokens", 2, 1)
    assert reason_of(driver, driver.forward_backward("nobody", [good])) == "NOT_FOUND"
    assert reason_of(driver, driver.forward_backward(adapter_id, [good], loss_fn="hinge")) == "INVALID_LOSS"
    assert reason_of(driver, driver.forward_backward(adapter_id, [good], config={"beta": 1})) == "INVALID_LOSS"
    assert reason_of(driver, driver.forward_backward(adapter_id, [])) == "INVALID_ARGUMENT"
    assert reason_of(driver, driver.sample([1], max_tokens=5000)) == "CONTEXT_LENGTH"
    assert reason_of(driver, driver.sample([999])) == "INVALID_ARGUMENT"
    image = datum_pb2.ModelInput(chunks=[datum_pb2.Chunk(image=datum_pb2.ImageChunk(data=b"x"))])
    assert reason_of(driver, driver.forward_backward(adapter_id, [datum_pb2.Datum(model_input=image)])) == "UNSUPPORTED"
    assert reason_of(driver, worker_pb2.WorkerCommand()) == "INTERNAL"
    assert driver.call(driver.forward_backward(adapter_id, [good])).final


def test_fault_in_a_command_is_internal_and_changes_nothing(driver, caplog) -> None:
    adapter_id = driver.new_adapter()
    driver.call(driver.forward_backward(adapter_id, [driver.datum([1, 2, 3])]))
    outside_vocabulary = driver.datum([1, 999, 3])
    error = error_of(driver, driver.forward_backward(adapter_id, [outside_vocabulary]))
    assert error.reason == error_pb2.ERROR_REASON_INTERNAL and "IndexError" in error.message
    driver.run(asyncio.sleep(0.2))
    assert "Traceback" in caplog.text and "IndexError" in caplog.text
    norm = driver.call(driver.optim_step(adapter_id, learning_rate=0.0)).optim_step.metrics["grad_norm"]
    twin = driver.new_adapter()
    driver.call(driver.forward_backward(twin, [driver.datum([1, 2, 3])]))
    assert driver.call(driver.optim_step(twin, learning_rate=0.0)).optim_step.metrics["grad_norm"] == norm


def test_non_finite_gradient_refuses_the_step(driver) -> None:
    adapter_id = driver.new_adapter()
    driver.call(driver.forward_backward(adapter_id, [driver.datum([1, 2], weights=[np.inf])]))
    assert reason_of(driver, driver.optim_step(adapter_id)) == "NON_FINITE"
    assert driver.call(driver.optim_step(adapter_id)).step == 1


def test_weights_that_overflow_fail_their_samples_only(driver) -> None:
    adapter_id = driver.new_adapter()
    driver.call(driver.forward_backward(adapter_id, [driver.datum(range(8))]))
    driver.call(driver.optim_step(adapter_id, learning_rate=1e36))
    driver.publish(adapter_id, "overflown")

    async def both() -> list[object]:
        commands = driver.sample([1], key="overflown"), driver.sample([1], seed=1)
        return await asyncio.gather(*map(driver.worker.call, commands), return_exceptions=True)

    failed, other = driver.run(both())
    assert isinstance(failed, WorkerError) and failed.error_info.reason == error_pb2.ERROR_REASON_NON_FINITE
    alone = driver.call(driver.sample([1], seed=1))
    assert tokens_of(other.sample.sequences[0]) == tokens_of(alone.sample.sequences[0])


def test_stats_count_work(driver) -> None:
    before = driver.stats()
    adapter_id = driver.new_adapter()
    driver.call(driver.forward_backward(adapter_id, [driver.datum(range(11))]))
    driver.call(driver.forward_backward(adapter_id, [driver.datum(range(4))], forward_only=True))
    driver.call(driver.sample([1], max_tokens=5, stop_token_ids=sampling_pb2.StopTokenIds()))
    after = driver.stats()
    change = {name: after[name] - before[name] for name in after}
    assert (change["adapters"], change["tokens_trained"], change["tokens_scored"]) == (1, 10, 3)
    assert change["sampler_tokens_generated"] == 5
    assert change["training_seconds"] > 0 and change["sampling_seconds"] > 0
    assert after["rss_bytes"] > 50e6 and after["commands_waiting"] == 0
    driver.call(worker_pb2.WorkerCommand(drop_adapter=worker_pb2.DropAdapter(adapter_id=adapter_id)))
    assert driver.stats()["adapters"] == before["adapters"]


def test_interrupt_at_the_terminal_leaves_the_worker_alone(driver) -> None:
    os.kill(driver.worker.pid, signal.SIGINT)
    assert driver.stats()["adapters"] >= 0


def test_saved_files_are_plain_data(driver, tmp_path) -> None:
    path = directory(tmp_path, "state")
    save = worker_pb2.SaveState(adapter_id=driver.new_adapter(), directory=path)
    driver.call(worker_pb2.WorkerCommand(save_state=save))
    files = sorted(Path(path).iterdir())
    assert {file.suffix for file in files} == {".json", ".safetensors"}
    assert all(json.loads(file.read_text()) for file in files if file.suffix == ".json")
