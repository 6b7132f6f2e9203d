"""Names, kinds, samplers, lists, files, health: what the services answer on the wire."""

import asyncio
import hashlib
import threading
import time

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from opentinker_client.wire.v1 import (
    operation_pb2,
    policy_pb2,
    registry_pb2,
    sampling_pb2,
    session_pb2,
    tensor_pb2,
    training_pb2,
)

SUCCEEDED = operation_pb2.OPERATION_STATE_SUCCEEDED
EVIL = ["../../x", "/tmp/x", "a/../../b", "..", "x" * 300, "nul\0byte", "%2e%2e%2fx", "back\\slash", " ", "\n", "é"]


def test_the_server_says_what_it_is(raw) -> None:
    info = raw.sessions.GetServerInfo(session_pb2.GetServerInfoRequest())
    assert [(m.model_name, m.vocab_size, m.max_context_length) for m in info.models] == [("t0", 256, 1024)]
    assert "cross_entropy" in info.loss_fns and info.limits.max_adapters == 100 and info.session_lease_s > 0


def test_health_and_reflection_answer(raw) -> None:
    health = health_pb2_grpc.HealthStub(raw.channel)
    for service in ("", "opentinker.v1.TrainingService", "opentinker.v1.RegistryService"):
        answer = health.Check(health_pb2.HealthCheckRequest(service=service))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    requests = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
    answer = next(reflection_pb2_grpc.ServerReflectionStub(raw.channel).ServerReflectionInfo(requests))
    names = {service.name for service in answer.list_services_response.service}
    ours = {f"opentinker.v1.{name}Service" for name in ("Session", "Training", "Operation", "Sampling", "Registry")}
    assert ours | {"grpc.health.v1.Health"} <= names


@pytest.mark.parametrize("sent", ["mine-1.2_3", "", "has space", "x" * 65])
def test_every_answer_carries_a_request_id(raw, refused, sent: str) -> None:
    metadata = (("x-request-id", sent),) if sent else ()
    _, call = raw.sessions.GetServerInfo.with_call(session_pb2.GetServerInfoRequest(), metadata=metadata)
    answered = dict(call.trailing_metadata())["x-request-id"]
    assert answered == sent if sent == "mine-1.2_3" else answered not in ("", sent)
    with refused("NOT_FOUND") as refusal:
        raw.registry.GetAdapter(registry_pb2.GetAdapterRequest(adapter_id="none"), metadata=metadata)
    assert refusal.trailing["x-request-id"] == refusal.info.request_id
    assert (refusal.info.request_id == sent) == (sent == "mine-1.2_3")


def test_evil_names_are_refused_everywhere_and_touch_nothing(raw, refused, control_server) -> None:
    adapter_id = raw.adapter()
    before = sorted(p for p in control_server.state_dir.rglob("*") if p.suffix not in (".db-wal", ".db-shm"))
    seq_id = 0
    for name in EVIL:
        for act in (raw.save, raw.publish):
            seq_id += 1
            with refused("INVALID_ARGUMENT") as refusal:
                act(raw.place(adapter_id, seq_id), name)
            assert refusal.info.field == "name"
        for uri in (f"opentinker://{adapter_id}/checkpoints/{name}", f"opentinker://{name}/checkpoints/c"):
            for act in (
                lambda uri: raw.registry.DeleteArtifact(registry_pb2.DeleteArtifactRequest(uri=uri)),
                lambda uri: raw.registry.GetCheckpoint(registry_pb2.GetCheckpointRequest(uri=uri)),
                lambda uri: list(raw.registry.ExportArtifact(registry_pb2.ExportArtifactRequest(uri=uri))),
                lambda uri: raw.sampler(uri=uri),
            ):
                with refused("INVALID_ARGUMENT") as refusal:
                    act(uri)
                assert refusal.info.field == "uri"
        with refused("NOT_FOUND"):
            raw.registry.GetAdapter(registry_pb2.GetAdapterRequest(adapter_id=name))
    with refused("INVALID_ARGUMENT"):
        raw.save(raw.place(adapter_id, seq_id + 1), "")
    after = sorted(p for p in control_server.state_dir.rglob("*") if p.suffix not in (".db-wal", ".db-shm"))
    assert after == before
    assert raw.ended(raw.save(raw.place(adapter_id, seq_id + 2), "plain")).state == SUCCEEDED


def test_what_does_not_exist_is_not_found_and_named(raw, refused) -> None:
    adapter_id = raw.adapter()
    other = "a-" + "z" * 20
    for act, named in (
        (lambda: raw.optim_step(raw.place(other, 1)), other),
        (lambda: raw.sampler(uri=f"opentinker://{adapter_id}/snapshots/1"), "snapshots/1"),
        (lambda: raw.sampler(policy=policy_pb2.PolicyRef(adapter_id=adapter_id)), "no snapshot yet"),
        (lambda: raw.sampler(policy=policy_pb2.PolicyRef(adapter_id=adapter_id, version=-1)), "version -1"),
        (lambda: raw.sampler(base_model="gpt"), "t0"),
        (lambda: raw.sample("p-none"), "p-none"),
        (lambda: raw.operations.WaitOperation(operation_pb2.WaitOperationRequest(op_id="o-none")), "o-none"),
        (lambda: raw.training.CreateAdapter(raw.creation(base_model="gpt")), "t0"),
        (lambda: next(raw.registry.GetTokenizer(registry_pb2.GetTokenizerRequest(base_model="gpt"))), "t0"),
    ):
        with refused("NOT_FOUND") as refusal:
            act()
        assert refusal.code == grpc.StatusCode.NOT_FOUND and named in refusal.info.message


def test_a_wrong_kind_is_answered_with_both_kinds_and_the_call_to_use(raw, refused) -> None:
    adapter_id = raw.adapter()
    checkpoint = raw.ended(raw.save(raw.place(adapter_id, 1), "c")).checkpoint.uri
    snapshot = raw.ended(raw.publish(raw.place(adapter_id, 2), "s")).snapshot.uri
    load = training_pb2.LoadStateRequest(sequence=raw.place(adapter_id, 3), uri=snapshot, with_optimizer=True)
    for act in (
        lambda: raw.sampler(uri=checkpoint),
        lambda: raw.training.LoadState(load),
        lambda: raw.training.CreateAdapter(raw.creation(base_model="", from_uri=snapshot, with_optimizer=True)),
        lambda: raw.registry.GetCheckpoint(registry_pb2.GetCheckpointRequest(uri=snapshot)),
    ):
        with refused("WRONG_KIND") as refusal:
            act()
        assert "checkpoint" in refusal.info.message and "snapshot" in refusal.info.message
    with refused("INVALID_ARGUMENT") as refusal:
        list(raw.registry.ExportArtifact(registry_pb2.ExportArtifactRequest(uri=snapshot, format=9)))
    assert refusal.info.field == "format"
    load.sequence.seq_id, load.with_optimizer = 4, False
    assert raw.ended(raw.training.LoadState(load).operation).state == SUCCEEDED


def test_a_sampler_is_bound_once_for_each_key(raw, refused) -> None:
    adapter_id = raw.adapter()
    snapshot = raw.ended(raw.publish(raw.place(adapter_id, 1), "s")).snapshot
    request = sampling_pb2.CreateSamplerRequest(session_id=raw.session_id, client_key=raw.key(), uri=snapshot.uri)
    first = raw.sampling.CreateSampler(request).sampler
    assert raw.sampling.CreateSampler(request).sampler == first
    request.base_model = "t0"
    with refused("SEQUENCE_CONFLICT"):
        raw.sampling.CreateSampler(request)


def test_a_sampler_follows_its_adapter_only_when_told(raw, refused) -> None:
    adapter_id = raw.adapter()
    raw.ended(raw.publish(raw.place(adapter_id, 1), "one"))
    latest = raw.sampler(policy=policy_pb2.PolicyRef(adapter_id=adapter_id))
    assert latest.snapshot.version == 1
    old = raw.sample(latest.sampler_id)
    raw.forward_backward(raw.place(adapter_id, 2), [raw.datum(50)])
    raw.optim_step(raw.place(adapter_id, 3), 0.5)
    raw.ended(raw.publish(raw.place(adapter_id, 4), "two"))
    assert raw.sample(latest.sampler_id) == old
    refresh = sampling_pb2.RefreshSamplerRequest(sampler_id=latest.sampler_id)
    assert raw.sampling.RefreshSampler(refresh).sampler.snapshot.version == 2
    assert raw.sample(latest.sampler_id) != old
    refresh.version = 1
    assert raw.sampling.RefreshSampler(refresh).sampler.snapshot.version == 1
    assert raw.sample(latest.sampler_id) == old
    refresh.version = 3
    with refused("NOT_FOUND"):
        raw.sampling.RefreshSampler(refresh)
    for _ in range(2):
        raw.sampling.DeleteSampler(sampling_pb2.DeleteSamplerRequest(sampler_id=latest.sampler_id))
    with refused("NOT_FOUND"):
        raw.sample(latest.sampler_id)


def test_pipelined_publications_in_memory_can_each_be_bound(raw, refused) -> None:
    adapter_id = raw.adapter()
    published = [raw.publish(raw.place(adapter_id, seq_id)) for seq_id in (1, 2, 3)]
    snapshots = [raw.ended(operation).snapshot for operation in published]
    samplers = [raw.sampler(uri=snapshot.uri) for snapshot in snapshots]
    assert [sampler.snapshot.version for sampler in samplers] == [1, 2, 3]
    assert len(raw.sample(samplers[0].sampler_id)) == 8
    raw.sampling.DeleteSampler(sampling_pb2.DeleteSamplerRequest(sampler_id=samplers[0].sampler_id))
    get = registry_pb2.GetSnapshotRequest(policy=policy_pb2.PolicyRef(adapter_id=adapter_id, version=1))
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            raw.registry.GetSnapshot(get)
        except grpc.RpcError as error:
            assert error.code() == grpc.StatusCode.NOT_FOUND
            break
        time.sleep(0.02)
    else:
        raise AssertionError("a snapshot in memory outlived its last sampler")
    with refused("FAILED_PRECONDITION"):
        list(raw.registry.ExportArtifact(registry_pb2.ExportArtifactRequest(uri=snapshots[1].uri)))


def test_a_deleted_snapshot_is_gone_for_samplers_and_lists(raw, refused, control_server) -> None:
    adapter_id = raw.adapter()
    snapshot = raw.ended(raw.publish(raw.place(adapter_id, 1), "s")).snapshot
    sampler = raw.sampler(uri=snapshot.uri)
    raw.sample(sampler.sampler_id)
    folder = control_server.state_dir / "adapters" / adapter_id / "snapshots"
    assert len(list(folder.iterdir())) == 1
    raw.registry.DeleteArtifact(registry_pb2.DeleteArtifactRequest(uri=snapshot.uri))
    assert list(folder.iterdir()) == []
    with refused("NOT_FOUND"):
        raw.sample(sampler.sampler_id)
    listed = raw.registry.ListSnapshots(registry_pb2.ListSnapshotsRequest(adapter_id=adapter_id))
    assert (list(listed.snapshots), listed.total_count) == ([], 0)
    assert raw.ended(raw.publish(raw.place(adapter_id, 2), "s")).snapshot.version == 2


def test_a_publication_that_cannot_be_stored_does_not_block_the_next(raw, control_server) -> None:
    adapter_id = raw.adapter()
    folder = control_server.state_dir / "adapters" / adapter_id
    folder.mkdir(parents=True)
    (folder / "snapshots").write_text("in the way")
    failed = raw.ended(raw.publish(raw.place(adapter_id, 1), "s"))
    assert failed.state == operation_pb2.OPERATION_STATE_FAILED
    (folder / "snapshots").unlink()
    published = raw.ended(raw.publish(raw.place(adapter_id, 2), "s"))
    assert published.state == SUCCEEDED and published.snapshot.version == 1
    assert len(raw.sample(raw.sampler(uri=published.snapshot.uri).sampler_id)) == 8
    assert list((control_server.state_dir / "tmp").iterdir()) == []


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"num_samples": 0}, "num_samples"),
        ({"num_samples": 10**6}, "num_samples"),
        ({"topk_sample_logprobs": -1}, "topk_sample_logprobs"),
        ({"params": {"temperature": float("nan")}}, "temperature"),
        ({"params": {"temperature": -1}}, "temperature"),
        ({"params": {"top_k": 0}}, "top_k"),
        ({"params": {"top_p": 0}}, "top_p"),
        ({"params": {"top_p": 1.5}}, "top_p"),
        ({"params": {"max_tokens": 0}}, "max_tokens"),
        ({"params": {"max_tokens": -5}}, "max_tokens"),
        ({"params": {"stop_texts": sampling_pb2.StopTexts(texts=["x", ""])}}, "stop"),
        ({"params": {"stop_token_ids": sampling_pb2.StopTokenIds(ids=[256])}}, "stop"),
        ({"params": {"logprobs_mode": 7}}, "logprobs_mode"),
    ],
)
def test_sampling_values_out_of_range_are_named(raw, refused, change: dict, field: str) -> None:
    request = raw.sample_request(raw.sampler(base_model="t0").sampler_id)
    for name, value in change.items():
        if name == "params":
            request.params.MergeFrom(sampling_pb2.SamplingParams(**value))
        else:
            setattr(request, name, value)
    with refused("INVALID_ARGUMENT") as refusal:
        raw.sampling.Sample(request)
    assert refusal.info.field == field


def test_context_is_refused_with_its_three_numbers(raw, refused) -> None:
    request = raw.sample_request(raw.sampler(base_model="t0").sampler_id, max_tokens=1022)
    with refused("CONTEXT_LENGTH") as refusal:
        raw.sampling.Sample(request)
    assert all(number in refusal.info.message for number in ("3 tokens", "1022", "1024"))
    assert (refusal.info.expected, refusal.info.actual) == (1024, 1025)


def test_unseeded_samples_differ_and_streams_end_with_the_whole(raw) -> None:
    sampler_id = raw.sampler(base_model="t0").sampler_id
    request = raw.sample_request(sampler_id, max_tokens=24)
    request.params.ClearField("seed")
    assert raw.sampling.Sample(request).sequences[0].tokens != raw.sampling.Sample(request).sequences[0].tokens
    request.params.seed = 5
    events = list(raw.sampling.StreamSample(sampling_pb2.StreamSampleRequest(request=request)))
    assert [event.WhichOneof("event") for event in events[:-1]] == ["delta"] * (len(events) - 1)
    streamed = b"".join(event.delta.tokens for event in events[:-1])
    assert streamed == events[-1].done.sequences[0].tokens == raw.sampling.Sample(request).sequences[0].tokens


def test_a_cancelled_or_late_call_stops_its_generation(raw, control_server) -> None:
    """By the worker's own counters: no sequence runs or waits soon after."""
    request = raw.sample_request(raw.sampler(base_model="t0").sampler_id, max_tokens=1000)
    request.num_samples = 64
    with pytest.raises(grpc.RpcError) as late:
        raw.sampling.Sample(request, timeout=0.3)
    assert late.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    stream = raw.sampling.StreamSample(sampling_pb2.StreamSampleRequest(request=request))
    next(stream)
    stream.cancel()
    started = time.monotonic()
    assert len(raw.sample(request.sampler_id)) == 8
    deadline = time.monotonic() + 10
    while worker_load(control_server) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert worker_load(control_server) == 0
    assert time.monotonic() - started < 10


def worker_load(server) -> int:
    """Sequences that the worker's sampler runs or keeps waiting."""
    from opentinker_server.workers.v1 import worker_pb2

    supervisor = server._server._worker
    ask = supervisor.call(worker_pb2.WorkerCommand(get_stats=worker_pb2.GetStats()))
    values = asyncio.run_coroutine_threadsafe(ask, server._loop).result(10).stats.values
    gauges = [name for name in values if name in ("sampler_running", "sampler_waiting")]
    assert len(gauges) == 2, sorted(values)
    return int(sum(values[name] for name in gauges))


def test_lists_are_paged_newest_first_with_the_total(raw, refused) -> None:
    adapter_id = raw.adapter()
    for seq_id in range(1, 6):
        raw.ended(raw.save(raw.place(adapter_id, seq_id), f"c{seq_id}"))
    request = registry_pb2.ListCheckpointsRequest(adapter_id=adapter_id, page=registry_pb2.Page(limit=2, offset=1))
    page = raw.registry.ListCheckpoints(request)
    assert [c.name for c in page.checkpoints] == ["c4", "c3"] and page.total_count == 5
    request.page.offset = 100
    page = raw.registry.ListCheckpoints(request)
    assert list(page.checkpoints) == [] and page.total_count == 5
    request.page.limit = -1
    with refused("INVALID_ARGUMENT"):
        raw.registry.ListCheckpoints(request)


def test_a_taken_name_is_refused_and_overwriting_replaces(raw, refused) -> None:
    adapter_id = raw.adapter()
    first = raw.ended(raw.save(raw.place(adapter_id, 1), "c")).checkpoint
    with refused("ALREADY_EXISTS"):
        raw.save(raw.place(adapter_id, 2), "c")
    raw.ended(raw.optim_step(raw.place(adapter_id, 3)))
    second = raw.ended(raw.save(raw.place(adapter_id, 4), "c", overwrite=True)).checkpoint
    assert (first.step, second.step) == (0, 1) and first.uri == second.uri
    found = raw.registry.GetCheckpoint(registry_pb2.GetCheckpointRequest(uri=first.uri)).checkpoint
    assert found == second


def test_expiry_is_kept_in_the_background(raw, control_server) -> None:
    adapter_id = raw.adapter()
    short = raw.ended(raw.save(raw.place(adapter_id, 1), "short", ttl_seconds=1)).checkpoint
    kept = raw.ended(raw.save(raw.place(adapter_id, 2), "kept", ttl_seconds=1)).checkpoint
    assert short.expires_at.seconds - short.created_at.seconds in (0, 1, 2)
    raw.registry.SetTtl(registry_pb2.SetTtlRequest(uri=kept.uri))
    folder = control_server.state_dir / "adapters" / adapter_id / "checkpoints"
    deadline = time.monotonic() + 20
    while len(list(folder.iterdir())) > 1 and time.monotonic() < deadline:
        time.sleep(0.1)
    listed = raw.registry.ListCheckpoints(registry_pb2.ListCheckpointsRequest(adapter_id=adapter_id)).checkpoints
    assert [c.name for c in listed] == ["kept"] and len(list(folder.iterdir())) == 1


def test_a_watch_sends_what_exists_and_then_what_comes(raw) -> None:
    adapter_id = raw.adapter()
    raw.ended(raw.publish(raw.place(adapter_id, 1), "one"))
    watch = raw.registry.WatchSnapshots(registry_pb2.WatchSnapshotsRequest(adapter_id=adapter_id))
    assert next(watch).snapshot.version == 1
    seen: list[int] = []
    waiting = threading.Thread(target=lambda: seen.append(next(watch).snapshot.version))
    waiting.start()
    raw.ended(raw.publish(raw.place(adapter_id, 2)))
    waiting.join(10)
    assert seen == [2]
    watch.cancel()


def test_exported_files_have_their_size_and_hash(raw) -> None:
    adapter_id = raw.adapter()
    uri = raw.ended(raw.publish(raw.place(adapter_id, 1), "s")).snapshot.uri
    streams = {
        "peft": raw.registry.ExportArtifact(registry_pb2.ExportArtifactRequest(uri=uri)),
        "merged": raw.registry.ExportArtifact(
            registry_pb2.ExportArtifactRequest(uri=uri, format=registry_pb2.EXPORT_FORMAT_MERGED)
        ),
        "tokenizer": raw.registry.GetTokenizer(registry_pb2.GetTokenizerRequest(base_model="t0")),
    }
    names = {}
    for kind, stream in streams.items():
        files: dict[str, bytes] = {}
        for answer in stream:
            part = answer.part
            files[part.name] = files.get(part.name, b"") + part.data
            size, sha256 = part.size_bytes, part.sha256
            if len(files[part.name]) == size:
                assert hashlib.sha256(files[part.name]).hexdigest() == sha256
            assert len(files[part.name]) <= size and "/" not in part.name
        names[kind] = set(files)
    assert names["peft"] == {"adapter_config.json", "adapter_model.safetensors"}
    assert {"config.json", "model.safetensors"} <= names["merged"]
    assert "tokenizer.json" in names["tokenizer"]


@pytest.mark.parametrize(
    "fault",
    ["short weights", "no target", "no advantages", "unknown key", "two axes", "id 256", "empty", "nan", "type"],
)
def test_a_malformed_datum_is_refused_whole_and_leaves_no_gradient(raw, refused, fault: str) -> None:
    adapter_id = raw.adapter()
    datum = raw.datum()
    loss_fn, field = "cross_entropy", "weights"
    if fault == "short weights":
        datum.weights.data, datum.weights.shape[:] = datum.weights.data[:-4], [4]
    elif fault == "no target":
        datum.ClearField("target_tokens")
        field = "target_tokens"
    elif fault == "no advantages":
        loss_fn, field = "ppo", "advantages"
        for name in ("logprobs", "mask"):
            getattr(datum, name).CopyFrom(datum.weights)
    elif fault == "unknown key":
        datum.extras["wieghts"].CopyFrom(datum.weights)
        field = "wieghts"
    elif fault == "two axes":
        datum.weights.shape[:] = [5, 1]
    elif fault == "id 256":
        datum.model_input.chunks[0].text.tokens = np.array([1, 2, 256, 4, 5], "<i4").tobytes()
        field = "model_input"
    elif fault == "empty":
        datum.model_input.chunks[0].text.tokens = b""
        field = "model_input"
    elif fault == "nan":
        datum.weights.data = np.array([1, 1, np.nan, 1, 1], "<f4").tobytes()
    else:
        datum.weights.dtype = tensor_pb2.DTYPE_INT32
    with refused("INVALID_DATUM") as refusal:
        good = raw.datum(seed=1)
        if loss_fn == "ppo":
            for name in ("logprobs", "mask", "advantages"):
                getattr(good, name).CopyFrom(good.weights)
            good.ClearField("weights")
            datum.ClearField("weights")
        raw.forward_backward(raw.place(adapter_id, 1), [good, datum, good], loss_fn=loss_fn)
    assert (refusal.info.datum_index, refusal.info.field) == (1, field)
    if fault == "short weights":
        assert (refusal.info.expected, refusal.info.actual) == (5, 4)
    step = raw.ended(raw.optim_step(raw.place(adapter_id, 2)))
    assert step.state == SUCCEEDED and step.optim_step.metrics["grad_norm"] == 0.0
