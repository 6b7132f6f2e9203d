"""CASES area K: transport and limits."""

import asyncio
import gc
import os
import pickle
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from support.calls import b_factors, ce, datum, gradient_of, probe, random_tokens

import opentinker_client as ot


@pytest.mark.slow
def test_tr1_a_call_above_four_mebibytes_is_one_gradient(bigram_service: ot.ServiceClient) -> None:
    """1,024 datums of 512 tokens with three fields: about 10 MiB in one logical call."""
    rng = np.random.default_rng(0)
    data = [
        datum(
            rng.integers(0, 32, 512).tolist(),
            rng.integers(0, 32, 512).tolist(),
            logprobs=np.full(512, -3.5, np.float32),
            advantages=rng.choice([-1e-3, 1e-3], 512).astype(np.float32),
        )
        for _ in range(1024)
    ]
    whole = bigram_service.create_lora_training_client("bigram", rank=2, seed=7).result()
    parts = bigram_service.create_lora_training_client("bigram", rank=2, seed=7).result()
    total = whole.forward_backward(data, "importance_sampling").result().metrics["loss:sum"]
    sums = [
        parts.forward_backward(data[start : start + 128], "importance_sampling").result().metrics["loss:sum"]
        for start in range(0, 1024, 128)
    ]
    assert total == pytest.approx(sum(sums), rel=1e-3, abs=1e-3)
    whole_gradient, parts_gradient = (b_factors(probe(bigram_service, trainer)) for trainer in (whole, parts))
    np.testing.assert_allclose(whole_gradient, parts_gradient, atol=1e-2 * np.abs(parts_gradient).max())


def test_tr1_above_the_maximum_is_refused_before_sending(t0_service: ot.ServiceClient) -> None:
    trainer = t0_service.create_lora_training_client("t0", rank=2, seed=7).result()
    capabilities = t0_service.get_server_capabilities()
    capabilities = capabilities.result() if hasattr(capabilities, "result") else capabilities
    too_many = [ce([1, 2, 3])] * (capabilities.limits.max_datums + 1)
    with pytest.raises((ot.APIError, ValueError), match=str(capabilities.limits.max_datums)):
        trainer.forward_backward(too_many, "cross_entropy").result()
    trainer.forward([ce([1, 2, 3])], "cross_entropy").result()


def test_a_failed_call_never_blocks_the_next_one(t0_service: ot.ServiceClient) -> None:
    trainer = t0_service.create_lora_training_client("t0", rank=4, seed=7).result()
    bad = trainer.forward_backward([datum([1, 2], [300, 3], weights=[1.0, 1.0])], "cross_entropy")
    good = trainer.forward_backward([ce([5, 6, 7])], "cross_entropy")
    with pytest.raises(ot.BadRequestError):
        bad.result(timeout=30)
    assert good.result(timeout=30).metrics["loss:sum"] > 0

    def broken(data: list, lps: list) -> tuple:
        raise RuntimeError("user fault")

    custom = trainer.forward_backward_custom([ce([5, 6, 7])], broken)
    step = trainer.optim_step(ot.AdamParams())
    with pytest.raises(RuntimeError, match="user fault"):
        custom.result(timeout=30)
    assert step.result(timeout=30).metrics["step"] == 1
    seen = gradient_of(t0_service, "t0", [ce([5, 6, 7])], "cross_entropy")
    assert np.abs(seen).max() > 0


FORK_CHILD = """
import os, sys, time
import opentinker_client as ot
service = ot.ServiceClient(base_url=sys.argv[1])
sampler = service.create_sampling_client(base_model="t0").result()
ask = lambda: sampler.sample(ot.ModelInput.from_ints([1, 2]), num_samples=1,
                             sampling_params=ot.SamplingParams(max_tokens=2)).result(timeout=25)
ask()
for _ in range(int(sys.argv[2])):
    child = os.fork()
    if child == 0:
        try:
            ask()
        except ot.OpenTinkerError as error:
            os._exit(3 if "fork" in str(error) else 4)
        except RuntimeError as error:
            os._exit(3 if "fork" in str(error) else 5)
        os._exit(0)
    deadline = time.monotonic() + 30
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            assert os.waitstatus_to_exitcode(status) in (0, 3), status
            break
        assert time.monotonic() < deadline, "child hangs"
        time.sleep(0.02)
    ask()
service.close().result()
"""


def test_tr3_fork_works_or_says_so_and_never_hangs(t0_address: str) -> None:
    result = subprocess.run(
        [sys.executable, "-c", FORK_CHILD, t0_address, "20"], capture_output=True, text=True, timeout=240
    )
    assert result.returncode == 0, result.stderr


def test_tr6_client_resources_are_released(t0_address: str) -> None:
    def cycle(close: bool) -> None:
        service = ot.ServiceClient(base_url=t0_address)
        service.create_lora_training_client("t0", rank=1).result()
        sampler = service.create_sampling_client(base_model="t0").result()
        settings = ot.SamplingParams(max_tokens=1)
        sampler.sample(ot.ModelInput.from_ints([1]), num_samples=1, sampling_params=settings).result()
        if close:
            service.close().result()

    def open_things() -> tuple[int, int]:
        gc.collect()
        time.sleep(0.5)
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    for i in range(10):
        cycle(close=i % 2 == 0)
    before = open_things()
    for i in range(300):
        cycle(close=i % 2 == 0)
    after = open_things()
    assert after[0] <= before[0] + 5 and after[1] <= before[1] + 3


def test_tr6_training_clients_are_released_and_the_process_ends(t0_address: str) -> None:
    code = """
import sys
import opentinker_client as ot
for i in range(5):
    service = ot.ServiceClient(base_url=sys.argv[1])
    trainer = service.create_lora_training_client("t0", rank=2).result()
    if i % 2:
        service.close().result()
print("done", flush=True)
"""
    process = subprocess.Popen([sys.executable, "-c", code, t0_address], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline().strip() == "done"
    process.wait(timeout=5)
    assert process.returncode == 0


def test_tr6_sync_call_inside_a_running_loop_works(t0_address: str) -> None:
    async def main() -> None:
        service = ot.ServiceClient(base_url=t0_address)
        sampler = service.create_sampling_client(base_model="t0").result(timeout=20)
        settings = ot.SamplingParams(max_tokens=2, seed=1)
        one = sampler.sample(ot.ModelInput.from_ints([1]), num_samples=1, sampling_params=settings)
        two = await sampler.sample_async(ot.ModelInput.from_ints([1]), num_samples=1, sampling_params=settings)
        assert list(one.result(timeout=20).sequences[0].tokens) == list(two.sequences[0].tokens)
        trainer = await service.create_lora_training_client_async("t0", rank=2)
        future = await trainer.forward_async([ce([1, 2, 3])], "cross_entropy")
        assert (await future).metrics["loss:sum"] > 0
        await service.close()

    asyncio.run(main())


def test_streaming_gives_the_tokens_of_the_whole_answer(t0_service: ot.ServiceClient) -> None:
    sampler = t0_service.create_sampling_client(base_model="t0").result()
    settings = ot.SamplingParams(max_tokens=12, seed=9)
    prompt = ot.ModelInput.from_ints(random_tokens(5, seed=1))
    whole = sampler.sample(prompt, num_samples=1, sampling_params=settings).result().sequences[0]
    streamed = [t for delta in sampler.sample_stream(prompt, sampling_params=settings) for t in delta.tokens]
    assert streamed == list(whole.tokens)


def test_a_pickled_sampling_client_gives_the_same_answers(t0_service: ot.ServiceClient) -> None:
    sampler = t0_service.create_sampling_client(base_model="t0").result()
    prompt, params = ot.ModelInput.from_ints([1, 2, 3]), ot.SamplingParams(max_tokens=6, seed=4)
    here = sampler.sample(prompt, num_samples=1, sampling_params=params).result().sequences[0].tokens
    code = (
        "import pickle, sys; import opentinker_client as ot\n"
        "sampler = pickle.loads(sys.stdin.buffer.read())\n"
        "params = ot.SamplingParams(max_tokens=6, seed=4)\n"
        "answer = sampler.sample(ot.ModelInput.from_ints([1, 2, 3]), num_samples=1, sampling_params=params)\n"
        "print(list(answer.result().sequences[0].tokens))"
    )
    result = subprocess.run([sys.executable, "-c", code], input=pickle.dumps(sampler), capture_output=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert result.stdout.decode().strip() == str(list(here))


def test_attach_takes_a_live_adapter_up_again(t0_address: str, tmp_path: Path) -> None:
    owner = ot.ServiceClient(base_url=t0_address)
    trainer = owner.create_lora_training_client("t0", rank=4, seed=7).result()
    trainer.forward_backward([ce([5, 6, 7])], "cross_entropy").result()
    other = ot.ServiceClient(base_url=t0_address)
    again = other.attach(trainer.model_id).result()
    assert again.optim_step(ot.AdamParams(learning_rate=1e-2)).result().metrics["step"] == 1
    moved = again.forward([ce([5, 6, 7])], "cross_entropy").result().metrics["loss:sum"]
    base = other.create_lora_training_client("t0", rank=4, seed=7).result()
    assert moved < base.forward([ce([5, 6, 7])], "cross_entropy").result().metrics["loss:sum"]
    for service in (other, owner):
        service.close().result()


CRASH = """
import sys
import opentinker_client as ot
service = ot.ServiceClient(base_url=sys.argv[1])
trainer = service.create_lora_training_client("t0", rank=4, seed=7).result()
datum = ot.Datum(model_input=ot.ModelInput.from_ints([5, 6]), loss_fn_inputs={"target_tokens": [6, 7]})
trainer.forward_backward([datum], "cross_entropy").result()
print(trainer.model_id, flush=True)
if sys.argv[2] == "raise":
    raise RuntimeError("a bug in the loop")
if sys.argv[2] == "with":
    with service:
        raise RuntimeError("a bug in the loop")
import os, signal
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("how", ["raise", "with", "kill"])
def test_the_adapter_of_a_program_that_died_is_taken_up_again(t0_address: str, how: str) -> None:
    """Its accumulated gradient is still there."""
    died = subprocess.run([sys.executable, "-c", CRASH, t0_address, how], capture_output=True, text=True, timeout=60)
    assert died.returncode != 0
    with ot.ServiceClient(base_url=t0_address) as service:
        again = service.attach(died.stdout.strip()).result()
        stepped = again.optim_step(ot.AdamParams()).result().metrics
        assert stepped["step"] == 1 and stepped["grad_norm"] > 0


def test_a_server_that_swallows_everything_is_named_within_ten_seconds() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        start = time.monotonic()
        service = ot.ServiceClient(base_url=f"127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(ot.APIConnectionError, match=str(silent.getsockname()[1])):
            service.create_lora_training_client("t0", rank=2).result()
        assert time.monotonic() - start < 10
        service.close()


def test_a_stream_ends_with_the_whole_answer_and_its_snapshot(t0_service: ot.ServiceClient) -> None:
    trainer = t0_service.create_lora_training_client("t0", rank=2).result()
    sampler = trainer.save_weights_and_get_sampling_client().result()
    stream = sampler.sample_stream(ot.ModelInput.from_ints([1]), ot.SamplingParams(max_tokens=3, seed=1))
    assert stream.response is None
    tokens = [token for delta in stream for token in delta.tokens]
    (sequence,) = stream.response.sequences
    assert list(sequence.tokens) == tokens and sequence.policy_version == 1


def test_unreachable_server_is_named_within_ten_seconds() -> None:
    start = time.monotonic()
    service = ot.ServiceClient(base_url="127.0.0.1:9")
    with pytest.raises(ot.APIConnectionError, match=r"127\.0\.0\.1:9"):
        service.create_lora_training_client("t0", rank=2).result()
    assert time.monotonic() - start < 10
