"""SamplingService."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc

from opentinker_client.wire.v1 import sampling_pb2, sampling_pb2_grpc
from opentinker_server.api.calls import streaming, unary
from opentinker_server.scheduler.errors import ServiceError
from opentinker_server.service.sampling import Samplers


class SamplingServicer(sampling_pb2_grpc.SamplingServiceServicer):
    """Samplers and sampling; a cancelled call stops its generation."""

    def __init__(self, *, samplers: Samplers):
        self._samplers = samplers

    @unary
    async def CreateSampler(self, request: sampling_pb2.CreateSamplerRequest, context: grpc.aio.ServicerContext):
        return sampling_pb2.CreateSamplerResponse(sampler=self._samplers.create(request))

    @unary
    async def RefreshSampler(self, request: sampling_pb2.RefreshSamplerRequest, context: grpc.aio.ServicerContext):
        return sampling_pb2.RefreshSamplerResponse(sampler=self._samplers.refresh(request))

    @unary
    async def DeleteSampler(self, request: sampling_pb2.DeleteSamplerRequest, context: grpc.aio.ServicerContext):
        self._samplers.delete(request.sampler_id)
        return sampling_pb2.DeleteSamplerResponse()

    @unary
    async def Sample(self, request: sampling_pb2.SampleRequest, context: grpc.aio.ServicerContext):
        answers = self._samplers.sample(request, stream=False)
        try:
            async for answer in answers:
                if isinstance(answer, sampling_pb2.SampleResponse):
                    return answer
        finally:
            await answers.aclose()  # type: ignore[attr-defined]
        raise ServiceError("INTERNAL", "the device worker ended the request without an answer")

    @streaming
    async def StreamSample(
        self, request: sampling_pb2.StreamSampleRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[sampling_pb2.StreamSampleResponse]:
        answers = self._samplers.sample(request.request, stream=True)
        try:
            async for answer in answers:
                if isinstance(answer, sampling_pb2.SampleDelta):
                    yield sampling_pb2.StreamSampleResponse(delta=answer)
                else:
                    yield sampling_pb2.StreamSampleResponse(done=answer)
        finally:
            await answers.aclose()  # type: ignore[attr-defined]
