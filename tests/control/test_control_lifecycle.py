"""Ends and beginnings: sessions, workers, whole servers; what is lost is said so, what is saved stays."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.server import RunningServer

from opentinker_client.wire.v1 import error_pb2, operation_pb2, policy_pb2, registry_pb2, session_pb2, training_pb2
from opentinker_server.scheduler.errors import ServiceError
from opentinker_server.state.artifacts import StateDirectoryInUse

SUCCEEDED = operation_pb2.OPERATION_STATE_SUCCEEDED
FAILED = operation_pb2.OPERATION_STATE_FAILED
ACTIVE, UNLOADED, LOST = (
    policy_pb2.ADAPTER_STATE_ACTIVE,
    policy_pb2.ADAPTER_STATE_UNLOADED,
    policy_pb2.ADAPTER_STATE_LOST,
)
LONG = 30
"""Datums of 600 tokens: seconds of work in several units."""


def state_of(client, adapter_id: str) -> int:
    return client.registry.GetAdapter(registry_pb2.GetAdapterRequest(adapter_id=adapter_id)).adapter.state


def long_call(client, adapter_id: str, seq_id: int) -> operation_pb2.Operation:
    """Begun, with seconds to go."""
    operation = client.forward_backward(
        client.place(adapter_id, seq_id), [client.datum(600, seed=i) for i in range(LONG)]
    )
    deadline = time.monotonic() + 30
    while client.ended(operation, timeout_s=0.05).datums_done == 0 and time.monotonic() < deadline:
        client.beat()
    running = client.ended(operation, timeout_s=0)
    assert running.state == operation_pb2.OPERATION_STATE_RUNNING and 0 < running.datums_done < LONG
    return operation


def create_when_free(client, *, seconds: float) -> str:
    """Id of an adapter, made as soon as the limit or a restart allows it."""
    deadline = time.monotonic() + seconds
    while True:
        client.beat()
        try:
            operation = client.ended(client.training.CreateAdapter(client.creation()).operation)
            if operation.state == SUCCEEDED:
                return operation.adapter.adapter_id
            failure = operation.error.message
        except grpc.RpcError as error:
            failure = error.details()
        assert time.monotonic() < deadline, failure
        time.sleep(0.1)


@pytest.fixture(scope="module")
def one_slot(t0_dir: Path, tmp_path_factory: pytest.TempPathFactory):
    """One adapter at a time; sessions live five seconds without a heartbeat."""
    settings = {
        "training.max_adapters": 1,
        "scheduler.session_lease_s": 5.0,
        "scheduler.sweep_interval_s": 0.2,
        "scheduler.result_ttl_s": 30.0,
    }
    with RunningServer(t0_dir, tmp_path_factory.mktemp("one") / "state", **settings) as server:
        yield server


def test_a_caller_that_does_not_wait_for_the_end_of_its_session_leaks_nothing(one_slot, connect, refused) -> None:
    """The client gives CloseSession two seconds; a running operation takes longer and is not torn apart."""
    client = connect(one_slot.address)
    adapter_id = client.adapter()
    running = long_call(client, adapter_id, 1)
    queued = client.optim_step(client.place(adapter_id, 2))
    with pytest.raises(grpc.RpcError) as late:
        client.sessions.CloseSession(session_pb2.CloseSessionRequest(session_id=client.session_id), timeout=0.1)
    assert late.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    assert client.ended(queued).error.reason == error_pb2.ERROR_REASON_SESSION_EXPIRED
    assert client.ended(running).state == SUCCEEDED
    other = connect(one_slot.address)
    mine = create_when_free(other, seconds=20)
    assert state_of(other, adapter_id) == UNLOADED
    with refused("SESSION_EXPIRED"):
        client.optim_step(client.place(adapter_id, 3))
    with refused("LIMIT_EXCEEDED") as refusal:
        other.training.CreateAdapter(other.creation())
    assert refusal.info.limit == 1
    other.ended(
        other.training.UnloadAdapter(training_pb2.UnloadAdapterRequest(sequence=other.place(mine, 1))).operation
    )
    other.sessions.CloseSession(session_pb2.CloseSessionRequest(session_id=other.session_id))


def test_an_adapter_whose_session_ends_while_it_is_made_takes_no_slot(one_slot, connect) -> None:
    for _ in range(5):
        client = connect(one_slot.address)
        creation = client.training.CreateAdapter(client.creation()).operation
        client.sessions.CloseSession(session_pb2.CloseSessionRequest(session_id=client.session_id))
        made = client.ended(creation)
        assert made.state == SUCCEEDED or made.error.reason == error_pb2.ERROR_REASON_SESSION_EXPIRED
        other = connect(one_slot.address)
        adapter_id = create_when_free(other, seconds=10)
        other.sessions.CloseSession(session_pb2.CloseSessionRequest(session_id=other.session_id))
        assert state_of(other, adapter_id) == UNLOADED


def test_a_session_lives_by_its_heartbeats(one_slot, connect, refused) -> None:
    quiet = connect(one_slot.address)
    adapter_id = create_when_free(quiet, seconds=10)
    for _ in range(13):
        time.sleep(0.5)
        assert quiet.beat() == 5.0
    assert state_of(quiet, adapter_id) == ACTIVE
    other = connect(one_slot.address)
    deadline = time.monotonic() + 20
    while state_of(other, adapter_id) == ACTIVE and time.monotonic() < deadline:
        time.sleep(0.5)
        other.beat()
    assert state_of(other, adapter_id) == UNLOADED
    with refused("SESSION_EXPIRED"):
        quiet.beat()
    with refused("SESSION_EXPIRED"):
        quiet.training.CreateAdapter(quiet.creation())
    create_when_free(other, seconds=10)
    other.sessions.CloseSession(session_pb2.CloseSessionRequest(session_id=other.session_id))


def test_an_attached_adapter_outlives_its_first_session(one_slot, connect) -> None:
    first, second = connect(one_slot.address), connect(one_slot.address)
    adapter_id = create_when_free(first, seconds=10)
    first.ended(first.optim_step(first.place(adapter_id, 1)))
    request = training_pb2.AttachAdapterRequest(session_id=second.session_id, adapter_id=adapter_id)
    adapter = second.training.AttachAdapter(request).adapter
    assert (adapter.session_id, adapter.next_seq_id, adapter.step) == (second.session_id, 2, 1)
    first.sessions.CloseSession(session_pb2.CloseSessionRequest(session_id=first.session_id))
    assert second.ended(second.optim_step(second.place(adapter_id, 2))).optim_step.metrics["step"] == 2
    second.sessions.CloseSession(session_pb2.CloseSessionRequest(session_id=second.session_id))
    assert state_of(second, adapter_id) == UNLOADED


def test_a_worker_that_hangs_is_replaced(t0_dir, tmp_path, connect, worker_pids) -> None:
    before = worker_pids()
    with RunningServer(t0_dir, tmp_path / "state", **{"scheduler.worker_timeout_s": 3.0}) as server:
        (pid,) = worker_pids() - before
        client = connect(server.address)
        adapter_id = client.adapter()
        os.kill(pid, signal.SIGSTOP)
        failed = client.ended(client.optim_step(client.place(adapter_id, 1)))
        assert failed.state == FAILED and failed.error.reason == error_pb2.ERROR_REASON_STATE_LOST
        create_when_free(client, seconds=60)
    assert worker_pids() == before


def test_a_saved_file_that_is_missing_is_named_on_export(t0_dir, tmp_path, connect, refused) -> None:
    with RunningServer(t0_dir, tmp_path / "state") as server:
        client = connect(server.address)
        saved = client.ended(client.save(client.place(client.adapter(), 1), "keep")).checkpoint
        for file in (tmp_path / "state").rglob("adapter_model.safetensors"):
            file.unlink()
        with refused("CORRUPT_DATA") as refusal:
            list(client.registry.ExportArtifact(registry_pb2.ExportArtifactRequest(uri=saved.uri)))
        assert refusal.info.field == "adapter_model.safetensors"


def test_a_killed_worker_loses_adapters_and_keeps_what_is_saved(
    t0_dir, tmp_path, connect, refused, worker_pids
) -> None:
    before = worker_pids()
    with RunningServer(t0_dir, tmp_path / "state") as server:
        (pid,) = worker_pids() - before
        client = connect(server.address)
        adapter_id, bare = client.adapter(), client.adapter()
        saved = client.ended(client.save(client.place(adapter_id, 1), "keep")).checkpoint
        named = client.ended(client.publish(client.place(adapter_id, 2), "named")).snapshot
        in_memory = client.ended(client.publish(client.place(adapter_id, 3))).snapshot
        by_name, by_memory = client.sampler(uri=named.uri), client.sampler(uri=in_memory.uri)
        tokens = client.sample(by_name.sampler_id)
        done = client.optim_step(client.place(adapter_id, 4))
        running = long_call(client, adapter_id, 5)
        queued = [client.optim_step(client.place(adapter_id, seq_id)) for seq_id in (6, 7)]
        os.kill(pid, signal.SIGKILL)

        for operation in (running, *queued):
            failed = client.ended(operation)
            assert failed.state == FAILED and failed.error.reason == error_pb2.ERROR_REASON_STATE_LOST
            assert saved.uri in failed.error.message
        assert client.optim_step(client.place(adapter_id, 4)).op_id == done.op_id  # its answer is still kept
        with refused("STATE_LOST") as refusal:
            client.optim_step(client.place(adapter_id, 8))
        assert saved.uri in refusal.info.message
        with refused("STATE_LOST") as refusal:
            client.optim_step(client.place(bare, 1))
        assert "no checkpoint" in refusal.info.message
        assert state_of(client, adapter_id) == LOST

        again = create_when_free(client, seconds=60)
        assert worker_pids() - before - {pid}
        assert client.sample(by_name.sampler_id) == tokens
        with refused("NOT_FOUND"):
            client.sample(by_memory.sampler_id)
        load = training_pb2.LoadStateRequest(sequence=client.place(again, 1), uri=saved.uri, with_optimizer=True)
        assert client.ended(client.training.LoadState(load).operation).state == SUCCEEDED
        assert client.ended(client.publish(client.place(again, 2), "same")).snapshot.sha256 == named.sha256
    assert worker_pids() == before


def test_a_restart_keeps_what_is_saved_and_says_what_is_lost(t0_dir, tmp_path, connect, refused) -> None:
    state = tmp_path / "state"
    with RunningServer(t0_dir, state) as server:
        client = connect(server.address)
        creation = client.creation()
        adapter_id = client.ended(client.training.CreateAdapter(creation).operation).adapter.adapter_id
        saved = client.ended(client.save(client.place(adapter_id, 1), "keep")).checkpoint
        named = client.ended(client.publish(client.place(adapter_id, 2), "named")).snapshot
        in_memory = client.ended(client.publish(client.place(adapter_id, 3))).snapshot
        tokens = client.sample(client.sampler(uri=named.uri).sampler_id)
        with pytest.raises(StateDirectoryInUse, match="another server"):
            RunningServer(t0_dir, state)
        orphan = state / "adapters" / adapter_id / "snapshots" / "orphan"
        orphan.mkdir()
        (state / "tmp" / "half").mkdir()
    with RunningServer(t0_dir, state) as server:
        assert not orphan.exists() and list((state / "tmp").iterdir()) == []
        client = connect(server.address)
        assert state_of(client, adapter_id) == LOST
        with refused("STATE_LOST") as refusal:
            client.optim_step(client.place(adapter_id, 4))
        assert saved.uri in refusal.info.message
        creation.session_id = client.session_id
        repeated = client.ended(client.training.CreateAdapter(creation).operation)
        assert repeated.error.reason == error_pb2.ERROR_REASON_STATE_LOST
        get = registry_pb2.GetCheckpointRequest(uri=saved.uri)
        assert client.registry.GetCheckpoint(get).checkpoint == saved
        listed = client.registry.ListSnapshots(registry_pb2.ListSnapshotsRequest(adapter_id=adapter_id)).snapshots
        assert list(listed) == [named] and in_memory not in listed
        assert client.sample(client.sampler(uri=named.uri).sampler_id) == tokens
        resumed = client.adapter(base_model="", lora=None, from_uri=saved.uri, with_optimizer=True)
        assert client.ended(client.publish(client.place(resumed, 1), "same")).snapshot.sha256 == named.sha256


def test_a_stop_finishes_the_running_unit_and_refuses_what_comes(t0_dir, tmp_path, connect, worker_pids) -> None:
    before = worker_pids()
    server = RunningServer(t0_dir, tmp_path / "state", **{"server.shutdown_grace_s": 110.0})
    client = connect(server.address)
    adapter_id = client.adapter()
    running = long_call(client, adapter_id, 1)
    queued = client.optim_step(client.place(adapter_id, 2))
    answers: list[operation_pb2.Operation] = []
    waits = [threading.Thread(target=lambda op=op: answers.append(client.ended(op))) for op in (running, queued)]
    for wait in waits:
        wait.start()
    stopping = threading.Thread(target=server.stop)
    stopping.start()
    health = health_pb2_grpc.HealthStub(client.channel)
    deadline = time.monotonic() + 10
    while health.Check(health_pb2.HealthCheckRequest()).status == health_pb2.HealthCheckResponse.SERVING:
        assert time.monotonic() < deadline
    with pytest.raises(grpc.RpcError) as late:
        client.optim_step(client.place(adapter_id, 3))
    assert late.value.code() == grpc.StatusCode.UNAVAILABLE
    for thread in (*waits, stopping):
        thread.join(120)
    by_seq = {answer.seq_id: answer for answer in answers}
    assert by_seq[1].state == SUCCEEDED
    assert by_seq[2].error.reason == error_pb2.ERROR_REASON_UNAVAILABLE
    assert worker_pids() == before


def test_a_server_that_cannot_start_leaves_nothing_behind(t0_dir, tmp_path, worker_pids) -> None:
    before = worker_pids()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(RuntimeError, match="bind"):
            RunningServer(t0_dir, tmp_path / "state", **{"server.port": taken.getsockname()[1]})
    with pytest.raises(ServiceError, match="did not start"):
        RunningServer("no-such-model", tmp_path / "state")
    assert worker_pids() == before
    with RunningServer(t0_dir, tmp_path / "state") as server:  # the state directory is free again
        assert server.address


def test_the_server_process_ends_by_signal_and_says_why_it_cannot_begin(t0_dir, tmp_path) -> None:
    command = [sys.executable, "-c", "from opentinker_server.cli.main import main; main()", "serve", "--port", "0"]
    command += ["--state-dir", str(tmp_path / "state")]
    bad = subprocess.run([*command, "--model", "no-such-model"], capture_output=True, text=True, timeout=120)
    assert bad.returncode == 1 and "Traceback" not in bad.stderr
    assert "unknown model" in bad.stderr.replace("\n", " ")
    server = subprocess.Popen([*command, "--model", str(t0_dir)], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        line = server.stdout.readline()
        assert "127.0.0.1:" in line
        server.send_signal(signal.SIGTERM)
        assert server.wait(30) == 0
    finally:
        server.kill()
        server.stdout.close()
        server.wait()
