"""SessionService."""

from __future__ import annotations

from importlib.metadata import version

import grpc

from opentinker_client.wire.v1 import session_pb2, session_pb2_grpc
from opentinker_server.api.calls import unary
from opentinker_server.config import Config
from opentinker_server.service.sessions import Sessions
from opentinker_server.service.supervisor import WorkerSupervisor
from opentinker_server.training.loss_specs import LOSS_SPECS


class SessionServicer(session_pb2_grpc.SessionServiceServicer):
    """Sessions, and what the server offers."""

    def __init__(self, *, config: Config, sessions: Sessions, worker: WorkerSupervisor):
        self._config = config
        self._sessions = sessions
        self._worker = worker

    @unary
    async def GetServerInfo(self, request: session_pb2.GetServerInfoRequest, context: grpc.aio.ServicerContext):
        ready, limits = self._worker.ready, self._config.limits
        return session_pb2.GetServerInfoResponse(
            server_version=version("opentinker"),
            models=[
                session_pb2.SupportedModel(
                    model_name=ready.base_model,
                    max_context_length=ready.max_context_length,
                    vocab_size=ready.vocab_size,
                    arch=ready.arch,
                    accepts_images=False,
                )
            ],
            limits=session_pb2.Limits(
                max_message_bytes=limits.max_message_bytes,
                max_call_bytes=limits.max_call_bytes,
                max_datums=limits.max_datums,
                max_rank=self._config.training.max_rank,
                max_adapters=self._config.training.max_adapters,
                max_num_samples=limits.max_num_samples,
            ),
            session_lease_s=self._sessions.lease_s,
            loss_fns=sorted(LOSS_SPECS),
        )

    @unary
    async def CreateSession(self, request: session_pb2.CreateSessionRequest, context: grpc.aio.ServicerContext):
        session_id = self._sessions.create(request.client_key, request.user_metadata)
        return session_pb2.CreateSessionResponse(session_id=session_id, lease_s=self._sessions.lease_s)

    @unary
    async def Heartbeat(self, request: session_pb2.HeartbeatRequest, context: grpc.aio.ServicerContext):
        self._sessions.heartbeat(request.session_id)
        return session_pb2.HeartbeatResponse(lease_s=self._sessions.lease_s)

    @unary
    async def CloseSession(self, request: session_pb2.CloseSessionRequest, context: grpc.aio.ServicerContext):
        await self._sessions.close(request.session_id)
        return session_pb2.CloseSessionResponse()
