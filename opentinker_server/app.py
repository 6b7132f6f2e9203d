"""Constructs the server from its parts and wires them; nothing else does."""

from __future__ import annotations

import asyncio
import logging
import signal
from dataclasses import dataclass

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from opentinker_client.wire.v1 import (
    operation_pb2,
    operation_pb2_grpc,
    registry_pb2,
    registry_pb2_grpc,
    sampling_pb2,
    sampling_pb2_grpc,
    session_pb2,
    session_pb2_grpc,
    training_pb2,
    training_pb2_grpc,
)
from opentinker_server.api.grpc_operations import OperationServicer
from opentinker_server.api.grpc_registry import RegistryServicer
from opentinker_server.api.grpc_sampling import SamplingServicer
from opentinker_server.api.grpc_session import SessionServicer
from opentinker_server.api.grpc_training import TrainingServicer
from opentinker_server.backends.base import Backend
from opentinker_server.backends.local import LocalBackend
from opentinker_server.config import Config
from opentinker_server.logging_setup import set_up_logging
from opentinker_server.scheduler.errors import ServiceError
from opentinker_server.scheduler.operations import OperationStore
from opentinker_server.service.adapters import Adapters
from opentinker_server.service.artifacts import Artifacts
from opentinker_server.service.sampling import Samplers
from opentinker_server.service.sessions import Sessions
from opentinker_server.service.supervisor import WorkerSupervisor
from opentinker_server.service.training import TrainingService
from opentinker_server.service.validation import ModelLimits
from opentinker_server.state.artifacts import ArtifactStore
from opentinker_server.state.database import Database, SnapshotRow
from opentinker_server.workers.config import EngineLimits, TrainerLimits, WorkerConfig

logger = logging.getLogger(__name__)

SERVICES = {
    "SessionService": session_pb2,
    "TrainingService": training_pb2,
    "OperationService": operation_pb2,
    "SamplingService": sampling_pb2,
    "RegistryService": registry_pb2,
}


@dataclass(frozen=True, kw_only=True)
class _Parts:
    """What `Server.start` made, for running and stopping."""

    grpc_server: grpc.aio.Server
    health: health.aio.HealthServicer
    sessions: Sessions
    adapters: Adapters
    artifacts: Artifacts
    operations: OperationStore
    samplers: Samplers
    housekeeping: asyncio.Task[None]


class Server:
    """One control plane with its worker. `start`, then `stop`; both on one event loop."""

    def __init__(self, config: Config, *, backend: Backend | None = None):
        self.config = config
        self._store = ArtifactStore(config.server.state_dir)
        url = config.server.database_url or f"sqlite:///{config.server.state_dir / 'opentinker.db'}"
        try:
            self._database = Database(url)
        except BaseException:
            self._store.close()
            raise
        self._worker = WorkerSupervisor(
            backend or LocalBackend(answer_timeout_s=config.scheduler.worker_timeout_s), worker_config(config)
        )
        self._parts: _Parts | None = None
        self._background: set[asyncio.Task] = set()
        self.address = ""
        """host:port, once started."""

    async def start(self) -> None:
        """Load the base model and listen; what was begun is ended when this fails.

        Raises ServiceError when the worker cannot start, RuntimeError when the address cannot be listened on.
        """
        try:
            await self._start()
        except BaseException:
            await self._worker.stop()
            self._close_state()
            raise

    async def _start(self) -> None:
        config, database, worker = self.config, self._database, self._worker
        await worker.start()
        ready = worker.ready
        model = ModelLimits(
            name=ready.base_model,
            vocab_size=ready.vocab_size,
            max_context_length=ready.max_context_length,
            accepts_images=ready.accepts_images,
        )
        sessions = Sessions(database, lease_s=config.scheduler.session_lease_s)
        adapters = Adapters(database, gap_timeout_s=config.scheduler.gap_timeout_s)
        artifacts = Artifacts(database, self._store)
        operations = OperationStore(result_ttl_s=config.scheduler.result_ttl_s)
        samplers = Samplers(
            config=config, model=model, adapters=adapters, artifacts=artifacts, sessions=sessions, worker=worker
        )
        training = TrainingService(
            config=config,
            model=model,
            adapters=adapters,
            artifacts=artifacts,
            operations=operations,
            samplers=samplers,
            sessions=sessions,
            worker=worker,
        )
        sessions.end_all_of_last_run()
        adapters.mark_lost_of_last_run()
        artifacts.forget_in_memory()
        artifacts.sweep()
        sessions.on_end += [training.end_session, samplers.end_session]
        worker.on_lost.append(lambda: self._worker_lost(adapters, samplers))

        limits = config.limits
        grpc_server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", limits.max_message_bytes),
                ("grpc.max_send_message_length", -1),
                ("grpc.so_reuseport", 0),
                # Agrees with the client, which pings every 30 s: pings more often than every 10 s are refused.
                ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.keepalive_time_ms", 60_000),
                ("grpc.keepalive_timeout_ms", 20_000),
            ]
        )
        session_pb2_grpc.add_SessionServiceServicer_to_server(
            SessionServicer(config=config, sessions=sessions, worker=worker), grpc_server
        )
        training_pb2_grpc.add_TrainingServiceServicer_to_server(
            TrainingServicer(service=training, limits=limits), grpc_server
        )
        operation_pb2_grpc.add_OperationServiceServicer_to_server(
            OperationServicer(operations=operations, adapters=adapters, training=training), grpc_server
        )
        sampling_pb2_grpc.add_SamplingServiceServicer_to_server(SamplingServicer(samplers=samplers), grpc_server)
        registry_pb2_grpc.add_RegistryServiceServicer_to_server(
            RegistryServicer(adapters=adapters, artifacts=artifacts, samplers=samplers, worker=worker), grpc_server
        )
        health_servicer = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(health_servicer, grpc_server)
        names = [module.DESCRIPTOR.services_by_name[name].full_name for name, module in SERVICES.items()]
        reflection.enable_server_reflection([*names, health.SERVICE_NAME, reflection.SERVICE_NAME], grpc_server)

        host = f"[{config.server.host}]" if ":" in config.server.host else config.server.host
        port = grpc_server.add_insecure_port(f"{host}:{config.server.port}")
        await grpc_server.start()
        for name in ["", *names]:
            await health_servicer.set(name, health_pb2.HealthCheckResponse.SERVING)
        self.address = f"{host}:{port}"
        self._parts = _Parts(
            grpc_server=grpc_server,
            health=health_servicer,
            sessions=sessions,
            adapters=adapters,
            artifacts=artifacts,
            operations=operations,
            samplers=samplers,
            housekeeping=asyncio.create_task(self._keep_house(sessions, artifacts, training, samplers)),
        )
        logger.info("serving %s on %s", model.name, self.address)

    async def stop(self) -> None:
        """Stop taking calls, let running ones end within the grace time, then end the worker."""
        parts = self._parts
        if parts is None:
            return
        self._parts = None
        parts.housekeeping.cancel()
        await parts.health.enter_graceful_shutdown()
        grace = self.config.server.shutdown_grace_s
        parts.operations.close()
        for queue in parts.adapters.queues.values():
            queue.fail_all(ServiceError("UNAVAILABLE", "the server is shutting down"))
        running = [op.ended.wait() for queue in parts.adapters.queues.values() for op in queue.running]
        if running:
            await asyncio.wait([asyncio.ensure_future(wait) for wait in running], timeout=grace)
        # Waits and streams that are open now are answered as they end, or cut after a second.
        await parts.grpc_server.stop(grace=min(grace, 1.0))
        await parts.sessions.stop()
        for queue in list(parts.adapters.queues.values()):
            await queue.close()
        await self._worker.stop()
        self._close_state()
        logger.info("stopped")

    def _close_state(self) -> None:
        self._database.close()
        self._store.close()

    def _worker_lost(self, adapters: Adapters, samplers: Samplers) -> None:
        samplers.worker_lost()
        for queue, error in adapters.mark_all_lost():
            task = asyncio.create_task(queue.close(error))
            self._background.add(task)
            task.add_done_callback(self._background.discard)

    async def _keep_house(
        self, sessions: Sessions, artifacts: Artifacts, training: TrainingService, samplers: Samplers
    ) -> None:
        """Ends expired sessions, deletes expired artifacts, forgets old results."""
        while True:
            await asyncio.sleep(self.config.scheduler.sweep_interval_s)
            try:
                sessions.expire()
                training.forget_old()
                for row in artifacts.expired():
                    artifacts.delete(row)
                    if isinstance(row, SnapshotRow):
                        await samplers.removed(row)
            except Exception:
                logger.exception("housekeeping failed; it is tried again")


def worker_config(config: Config) -> WorkerConfig:
    """The settings that concern the worker."""
    return WorkerConfig(
        model=config.model.name,
        model_name=config.model.public_name,
        cache_dir=str(config.model.cache_dir),
        device=config.model.device,
        dtype=config.model.dtype,  # type: ignore[arg-type]
        quantization=config.model.quantization,  # type: ignore[arg-type]
        threads=config.model.threads,
        training_weight=config.training.weight,
        sampling_weight=config.sampler.weight,
        deterministic=config.training.deterministic,
        log_level=config.logging.level,  # type: ignore[arg-type]
        trainer=TrainerLimits(
            max_tokens_per_micro_batch=config.training.max_tokens_per_micro_batch,
            head_chunk_rows=config.training.head_chunk_rows,
            recompute=config.training.recompute,  # type: ignore[arg-type]
            memory_bytes=config.training.memory_bytes,
            max_adapters=config.training.max_adapters,
            max_rank=config.training.max_rank,
        ),
        engine=EngineLimits(
            max_running=config.sampler.max_running,
            max_batched_tokens=config.sampler.max_batched_tokens,
            kv_cache_tokens=config.sampler.kv_cache_tokens,
            max_lora_rank=config.training.max_rank,
        ),
    )


async def run_server(config: Config) -> None:
    """Serve until SIGINT or SIGTERM; a second one ends at once. Raises RuntimeError when it cannot start."""
    set_up_logging(config.logging)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def request_stop() -> None:
        if stop.is_set():
            raise SystemExit(130)
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, request_stop)
    server = Server(config)
    starting = asyncio.create_task(server.start())
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        return
    try:
        await starting
    except ServiceError as error:
        raise RuntimeError(str(error)) from error
    print(f"OpenTinker serves {config.model.name} on {server.address}", flush=True)
    await stopping
    await server.stop()
