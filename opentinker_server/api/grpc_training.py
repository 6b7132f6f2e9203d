"""TrainingService."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc

from opentinker_client.wire.v1 import datum_pb2, training_pb2, training_pb2_grpc
from opentinker_server.api.calls import current_request_id, unary
from opentinker_server.config import LimitSettings
from opentinker_server.scheduler.errors import ServiceError
from opentinker_server.service.training import TrainingService


class TrainingServicer(training_pb2_grpc.TrainingServiceServicer):
    """Training calls; each is answered with its operation as soon as it is acknowledged."""

    def __init__(self, *, service: TrainingService, limits: LimitSettings):
        self._service = service
        self._limits = limits

    @unary
    async def CreateAdapter(self, request: training_pb2.CreateAdapterRequest, context: grpc.aio.ServicerContext):
        operation = self._service.create_adapter(request, current_request_id())
        return training_pb2.CreateAdapterResponse(operation=operation.to_message())

    @unary
    async def ForwardBackward(
        self,
        request: AsyncIterator[training_pb2.ForwardBackwardRequest],
        context: grpc.aio.ServicerContext,
    ):
        header, data = await self._read(request)
        operation = await self._service.forward_backward(header, data, current_request_id())
        return training_pb2.ForwardBackwardResponse(operation=operation.to_message())

    async def _read(
        self, messages: AsyncIterator[training_pb2.ForwardBackwardRequest]
    ) -> tuple[training_pb2.ForwardBackwardHeader, list[datum_pb2.Datum]]:
        """The header and all datums; limits are enforced while reading."""
        header: training_pb2.ForwardBackwardHeader | None = None
        data: list[datum_pb2.Datum] = []
        size = 0
        async for message in messages:
            part = message.WhichOneof("part")
            if header is None:
                if part != "header":
                    raise ServiceError("INVALID_ARGUMENT", "the first message of the stream must be the header")
                header = message.header
                continue
            error = None
            if part != "batch":
                error = ServiceError("INVALID_ARGUMENT", "only the first message of the stream may be a header")
            else:
                data.extend(message.batch.data)
                size += message.ByteSize()
                error = self._over_limit(size, len(data))
            if error is not None:
                self._service.refuse_stream(header, error)
                raise error
        if header is None:
            raise ServiceError("INVALID_ARGUMENT", "the stream is empty; its first message must be the header")
        if len(data) != header.num_datums:
            mismatch = ServiceError(
                "INVALID_ARGUMENT",
                f"the header announced {header.num_datums} datums, {len(data)} came",
                field="num_datums",
                expected=header.num_datums,
                actual=len(data),
            )
            # Fewer may be a stream that was cut: its id stays free, so that the whole call can be sent again.
            if len(data) > header.num_datums:
                self._service.refuse_stream(header, mismatch)
            raise mismatch
        return header, data

    def _over_limit(self, size: int, count: int) -> ServiceError | None:
        limits = self._limits
        if size > limits.max_call_bytes:
            return ServiceError(
                "LIMIT_EXCEEDED",
                f"the call is larger than {limits.max_call_bytes} bytes; send it as several calls",
                field="data",
                limit=limits.max_call_bytes,
            )
        if count > limits.max_datums:
            return ServiceError(
                "LIMIT_EXCEEDED",
                f"the call has more than {limits.max_datums} datums; send it as several calls",
                field="data",
                limit=limits.max_datums,
            )
        return None

    @unary
    async def OptimStep(self, request: training_pb2.OptimStepRequest, context: grpc.aio.ServicerContext):
        operation = await self._service.optim_step(request, current_request_id())
        return training_pb2.OptimStepResponse(operation=operation.to_message())

    @unary
    async def SaveCheckpoint(self, request: training_pb2.SaveCheckpointRequest, context: grpc.aio.ServicerContext):
        operation = await self._service.save_checkpoint(request, current_request_id())
        return training_pb2.SaveCheckpointResponse(operation=operation.to_message())

    @unary
    async def LoadState(self, request: training_pb2.LoadStateRequest, context: grpc.aio.ServicerContext):
        operation = await self._service.load_state(request, current_request_id())
        return training_pb2.LoadStateResponse(operation=operation.to_message())

    @unary
    async def PublishSnapshot(self, request: training_pb2.PublishSnapshotRequest, context: grpc.aio.ServicerContext):
        operation = await self._service.publish_snapshot(request, current_request_id())
        return training_pb2.PublishSnapshotResponse(operation=operation.to_message())

    @unary
    async def AttachAdapter(self, request: training_pb2.AttachAdapterRequest, context: grpc.aio.ServicerContext):
        return training_pb2.AttachAdapterResponse(adapter=self._service.attach(request))

    @unary
    async def UnloadAdapter(self, request: training_pb2.UnloadAdapterRequest, context: grpc.aio.ServicerContext):
        operation = await self._service.unload_adapter(request, current_request_id())
        return training_pb2.UnloadAdapterResponse(operation=operation.to_message())
