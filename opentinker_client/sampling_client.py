"""Sampling from one immutable snapshot, or from the base model."""

from __future__ import annotations

import secrets
import uuid
import weakref
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from typing import Any

from opentinker_client import types
from opentinker_client.arguments import checked, with_async_names
from opentinker_client.futures import APIFuture
from opentinker_client.tokenizer import load_tokenizer
from opentinker_client.transport.connection import Connection, Link, Stream
from opentinker_client.wire import requests, responses


async def open_sampler(
    connection: Connection,
    *,
    uri: str | None = None,
    base_model: str | None = None,
    metadata: Mapping[str, str] | None = None,
) -> SamplingClient:
    """Binds a new sampler. On the connection's loop."""
    link = connection.link
    request = requests.CreateSamplerRequest(
        session_id=await link.session_id(dict(metadata or {})), client_key=uuid.uuid4().hex
    )
    if uri is not None:
        request.uri = uri
    else:
        request.base_model = base_model or ""
    response = await link.call("sampling", "CreateSampler", request)
    return SamplingClient(connection, response.sampler)


@with_async_names(results=("sample", "compute_logprobs", "refresh"))
class SamplingClient:
    """A frozen policy: its answers never change while the adapter trains on, until `refresh`.

    Made by `ServiceClient.create_sampling_client` or `TrainingClient.save_weights_and_get_sampling_client`. It may be
    pickled while its session lives; the copy connects by itself.
    """

    def __init__(self, connection: Connection, sampler: Any, *, owned: bool = True):
        self._connection = connection
        self._sampler = sampler
        if owned:
            self._finalizer = weakref.finalize(self, _release, connection.link, sampler.sampler_id)
            self._finalizer.atexit = False  # the session is closed then, and the sampler with it

    @property
    def sampler_id(self) -> str:
        """Id of the sampler on the server."""
        return self._sampler.sampler_id

    @property
    def snapshot(self) -> types.Snapshot | None:
        """What it is bound to; None for the base model."""
        return responses.snapshot(self._sampler.snapshot) if self._sampler.HasField("snapshot") else None

    @property
    def policy_version(self) -> int | None:
        """Version of the snapshot; None for the base model."""
        return self._sampler.snapshot.version if self._sampler.HasField("snapshot") else None

    def get_base_model(self) -> str:
        """Name of the base model."""
        return self._sampler.base_model

    @checked
    def sample(
        self,
        prompt: types.ModelInput,
        num_samples: int,
        sampling_params: types.SamplingParams,
        include_prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
        topk_sample_logprobs: int = 0,
    ) -> APIFuture[types.SampleResponse]:
        """`num_samples` continuations of the prompt.

        Each sequence carries the snapshot that produced it and natural logarithms of the model's probabilities,
        equal to the trainer's. A lost connection is made again and the request repeated with the same seed, so the
        answer is the same. Cancelling stops the generation.
        """
        request = requests.sample(
            self.sampler_id,
            prompt,
            num_samples,
            _with_seed(sampling_params),
            prompt_logprobs=include_prompt_logprobs,
            topk_prompt_logprobs=topk_prompt_logprobs,
            topk_sample_logprobs=topk_sample_logprobs,
        )

        async def run(link: Link) -> types.SampleResponse:
            return responses.sample(await link.call("sampling", "Sample", request, timeout_s=None))

        return self._connection.submit(run(self._connection.link))

    @checked
    def sample_stream(
        self, prompt: types.ModelInput, sampling_params: types.SamplingParams, num_samples: int = 1
    ) -> Stream[types.SampleDelta]:
        """Tokens as they come: `for delta in ...` or `async for delta in ...`. Closing it stops the generation.

        After the last one `response` holds the whole answer, with the snapshot that produced it.
        """
        request = requests.StreamSampleRequest(
            request=requests.sample(self.sampler_id, prompt, num_samples, _with_seed(sampling_params))
        )
        link = self._connection.link

        async def deltas() -> AsyncIterator[types.SampleDelta]:
            messages = link.stream("sampling", "StreamSample", request)
            try:
                async for message in messages:
                    if message.WhichOneof("event") == "delta":
                        yield responses.sample_delta(message.delta)
                    else:
                        stream.response = responses.sample(message.done)
            finally:
                await messages.aclose()  # type: ignore[attr-defined]

        stream = self._connection.iterate(deltas)
        return stream

    @checked
    def compute_logprobs(self, prompt: types.ModelInput) -> APIFuture[list[float | None]]:
        """Natural log-probability of each token of the prompt given those before it; None at index 0.

        A prompt that fills the whole context is refused: the server generates one token after it.
        """
        sampled = self.sample(prompt, 1, types.SamplingParams(max_tokens=1, seed=0), include_prompt_logprobs=True)

        async def read() -> list[float | None]:
            response = await sampled
            assert response.prompt_logprobs is not None
            return response.prompt_logprobs

        return self._connection.submit(read())

    @checked
    def refresh(self, version: int | None = None) -> APIFuture[types.Snapshot]:
        """Binds to another version of the same adapter, the latest unless given: an explicit synchronisation point.

        Calls that are on their way keep the old version.
        """
        request = requests.RefreshSamplerRequest(sampler_id=self.sampler_id, version=version)

        async def run(link: Link) -> types.Snapshot:
            response = await link.call("sampling", "RefreshSampler", request)
            self._sampler = response.sampler
            return responses.snapshot(response.sampler.snapshot)

        return self._connection.submit(run(self._connection.link))

    def get_tokenizer(self) -> Any:
        """The base model's tokenizer, served by the server."""
        return load_tokenizer(self._connection, self._sampler.base_model)

    def __reduce__(self) -> tuple[Any, ...]:
        return _reconnect, (self._connection.address, self._sampler.SerializeToString())


def _with_seed(params: types.SamplingParams) -> types.SamplingParams:
    """A seed drawn here when none was given: a repeated request then gives the same tokens."""
    if not isinstance(params, types.SamplingParams) or params.seed is not None:
        return params
    return replace(params, seed=secrets.randbits(63))


def _reconnect(address: str, sampler: bytes) -> SamplingClient:
    message = responses.Sampler.FromString(sampler)
    return SamplingClient(Connection(address), message, owned=False)


def _release(link: Link, sampler_id: str) -> None:
    """The client was collected: the server may let the snapshot go."""
    if link.closed or link.loop.is_closed():
        return

    async def release() -> None:
        await link.call("sampling", "DeleteSampler", requests.DeleteSamplerRequest(sampler_id=sampler_id))

    link.loop.call_soon_threadsafe(lambda: link.spawn_quietly(release()))
