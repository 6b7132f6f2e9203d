"""Standard services and errors as any gRPC client sees them, without our SDK."""

import uuid

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from opentinker_client.wire.v1 import error_pb2, sampling_pb2, sampling_pb2_grpc, session_pb2, session_pb2_grpc


def test_health_is_served(t0_channel: grpc.Channel) -> None:
    stub = health_pb2_grpc.HealthStub(t0_channel)
    for service in ("", "opentinker.v1.TrainingService", "opentinker.v1.SamplingService"):
        answer = stub.Check(health_pb2.HealthCheckRequest(service=service))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


def test_reflection_lists_the_services(t0_channel: grpc.Channel) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(t0_channel)
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    answer = next(iter(stub.ServerReflectionInfo(iter([request]))))
    names = {service.name for service in answer.list_services_response.service}
    expected = {"Session", "Training", "Operation", "Sampling", "Registry"}
    assert {f"opentinker.v1.{name}Service" for name in expected} <= names
    assert "grpc.health.v1.Health" in names


def test_errors_carry_reason_field_and_request_id(t0_channel: grpc.Channel) -> None:
    stub = sampling_pb2_grpc.SamplingServiceStub(t0_channel)
    request = sampling_pb2.SampleRequest(sampler_id="p-" + "a" * 20, num_samples=1)
    with pytest.raises(grpc.RpcError) as caught:
        stub.Sample(request, metadata=(("x-request-id", "my-request.1"),))
    error = caught.value
    assert error.code() == grpc.StatusCode.NOT_FOUND
    metadata = dict(error.trailing_metadata())
    assert metadata["x-request-id"] == "my-request.1"
    status = error_pb2.ErrorStatus.FromString(metadata["grpc-status-details-bin"])
    info = error_pb2.ErrorInfo()
    assert status.code == grpc.StatusCode.NOT_FOUND.value[0] and status.details[0].Unpack(info)
    assert info.reason == error_pb2.ERROR_REASON_NOT_FOUND and info.field == "sampler_id"
    assert info.request_id == "my-request.1"


def test_sessions_are_idempotent_by_their_key(t0_channel: grpc.Channel) -> None:
    stub = session_pb2_grpc.SessionServiceStub(t0_channel)
    request = session_pb2.CreateSessionRequest(client_key=uuid.uuid4().hex)
    first, second = stub.CreateSession(request), stub.CreateSession(request)
    assert first.session_id == second.session_id
    stub.CloseSession(session_pb2.CloseSessionRequest(session_id=first.session_id))
    stub.CloseSession(session_pb2.CloseSessionRequest(session_id=first.session_id))
    with pytest.raises(grpc.RpcError) as caught:
        stub.Heartbeat(session_pb2.HeartbeatRequest(session_id=first.session_id))
    assert caught.value.code() == grpc.StatusCode.FAILED_PRECONDITION
