"""OperationService."""

from __future__ import annotations

import grpc

from opentinker_client.wire.v1 import operation_pb2, operation_pb2_grpc
from opentinker_server.api.calls import unary
from opentinker_server.scheduler.operations import OperationStore
from opentinker_server.service.adapters import Adapters
from opentinker_server.service.training import TrainingService

MAX_WAIT_S = 60.0


class OperationServicer(operation_pb2_grpc.OperationServiceServicer):
    """Waiting for, cancelling and explaining operations."""

    def __init__(self, *, operations: OperationStore, adapters: Adapters, training: TrainingService):
        self._operations = operations
        self._adapters = adapters
        self._training = training

    @unary
    async def WaitOperation(self, request: operation_pb2.WaitOperationRequest, context: grpc.aio.ServicerContext):
        timeout_s = min(max(request.timeout_ms, 0) / 1e3, MAX_WAIT_S)
        datums_seen = request.datums_seen if request.HasField("datums_seen") else None
        operation = await self._operations.wait(request.op_id, timeout_s=timeout_s, datums_seen=datums_seen)
        return operation_pb2.WaitOperationResponse(operation=operation.to_message())

    @unary
    async def CancelOperation(self, request: operation_pb2.CancelOperationRequest, context: grpc.aio.ServicerContext):
        operation = self._operations.get(request.op_id)
        queue = self._adapters.queues.get(operation.adapter_id)
        if queue is not None:
            queue.cancel(operation)
        if operation.stop is not None:
            await operation.stop()
        return operation_pb2.CancelOperationResponse(operation=operation.to_message())

    @unary
    async def ExplainOperation(self, request: operation_pb2.ExplainOperationRequest, context: grpc.aio.ServicerContext):
        return self._training.explain(request.op_id)
