"""Training of one adapter: gradients, steps, saves, in the order in which they are called."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from opentinker_client import types
from opentinker_client.arguments import checked, with_async_names
from opentinker_client.futures import APIFuture
from opentinker_client.sampling_client import SamplingClient, open_sampler
from opentinker_client.tokenizer import load_tokenizer
from opentinker_client.transport.connection import CALL_SECONDS, Connection, Link
from opentinker_client.wire import requests, responses

T = TypeVar("T")
CustomLoss = Callable[[list[types.Datum], list[Any]], tuple[Any, Mapping[str, Any]]]


class _Order:
    """The adapter's sequence of calls, on the connection's loop.

    Calls are submitted one after the other, each with the next sequence id, and are acknowledged long before they are
    done. An id whose call failed to be submitted is named in the next request, so that nothing waits for it.
    """

    def __init__(self, adapter_id: str, next_seq_id: int):
        self.adapter_id = adapter_id
        self.turn = asyncio.Lock()
        self._next = next_seq_id
        self._abandoned: list[int] = []

    async def submit(self, send: Callable[[Any], Awaitable[Any]]) -> Any:
        """`send` with the next place in the order; returns the acknowledged operation. The turn must be held."""
        sequence = requests.SequencePlace(
            adapter_id=self.adapter_id, seq_id=self._next, abandoned_seq_ids=self._abandoned
        )
        self._next += 1
        try:
            response = await send(sequence)
        except BaseException:
            self._abandoned.append(sequence.seq_id)
            raise
        self._abandoned.clear()
        return response.operation


@with_async_names(
    futures=(
        "forward",
        "forward_backward",
        "forward_backward_custom",
        "optim_step",
        "save_state",
        "load_state",
        "load_state_with_optimizer",
        "save_weights_for_sampler",
    ),
    results=("save_weights_and_get_sampling_client", "create_sampling_client", "get_info", "unload"),
)
class TrainingClient:
    """One adapter in training. Made by `ServiceClient`.

    Every call returns a future at once; calls run in the order in which they were made, so `forward_backward` and
    `optim_step` can both be sent before either is waited for. A failed call never blocks the next one.
    """

    def __init__(
        self, connection: Connection, adapter: Any, info: types.GetServerCapabilitiesResponse, *, next_seq_id: int
    ):
        self._connection = connection
        self._adapter = adapter
        self._info = info
        self._order = _Order(adapter.adapter_id, next_seq_id)
        self.model_id: str = adapter.adapter_id
        """Id of the adapter; `ServiceClient.attach` takes it."""

    def _call(self, method: str, request: Any, read: Callable[[Any], T]) -> APIFuture[T]:
        """One unary call in the adapter's order."""

        async def run(link: Link) -> T:
            async with self._order.turn:

                async def send(sequence: Any) -> Any:
                    request.sequence.CopyFrom(sequence)
                    return await link.call("training", method, request)

                operation = await self._order.submit(send)
            return read(await link.wait_operation(operation))

        return self._connection.submit(run(self._connection.link))

    def _prepare(
        self,
        data: Sequence[types.Datum],
        loss_fn: str,
        config: Mapping[str, Any] | None,
        *,
        forward_only: bool,
        trained_only: bool = False,
    ) -> Callable[[Link], Awaitable[Any]]:
        """Builds a forward or forward_backward; what is returned submits it, the turn being held."""
        header, batches = requests.forward_backward(
            data, loss_fn, config, forward_only=forward_only, trained_only=trained_only, limits=self._info.limits
        )

        size = sum(batch.ByteSize() for batch in batches)

        async def submit(link: Link) -> Any:
            async def send(sequence: Any) -> Any:
                header.sequence.CopyFrom(sequence)
                timeout_s = CALL_SECONDS + size / 2**20  # at least a mebibyte a second
                send_all = functools.partial(requests.stream, header, batches)
                return await link.call("training", "ForwardBackward", send_all, timeout_s=timeout_s)

            return await self._order.submit(send)

        return submit

    def _pass(
        self, submit: Callable[[Link], Awaitable[Any]], on_progress: Callable[[int], None] | None = None
    ) -> APIFuture[types.ForwardBackwardOutput]:
        async def run(link: Link) -> types.ForwardBackwardOutput:
            async with self._order.turn:
                operation = await submit(link)
            return responses.forward_backward(await link.wait_operation(operation, on_progress))

        return self._connection.submit(run(self._connection.link))

    @checked
    def forward(
        self,
        data: Sequence[types.Datum],
        loss_fn: types.LossFnType,
        loss_fn_config: Mapping[str, float | str] | None = None,
    ) -> APIFuture[types.ForwardBackwardOutput]:
        """Loss and log-probabilities, without a gradient."""
        return self._pass(self._prepare(data, loss_fn, loss_fn_config, forward_only=True))

    @checked
    def forward_backward(
        self,
        data: Sequence[types.Datum],
        loss_fn: types.LossFnType,
        loss_fn_config: Mapping[str, float | str] | None = None,
        *,
        trained_only: bool = False,
        on_progress: Callable[[int], None] | None = None,
    ) -> APIFuture[types.ForwardBackwardOutput]:
        """Loss, log-probabilities, and a gradient that is added to the adapter's until the next optim_step.

        Losses are sums over tokens and datums; `metrics["loss:sum"]` is the value. A malformed datum refuses the whole
        call and adds nothing. However large the data, it is one call and one gradient. With `trained_only` the
        log-probabilities of tokens of mask or weight 0 are not computed and come back as 0, which saves the output
        head's work on prompts.
        """
        submit = self._prepare(data, loss_fn, loss_fn_config, forward_only=False, trained_only=trained_only)
        return self._pass(submit, on_progress)

    @checked
    def forward_backward_custom(
        self, data: Sequence[types.Datum], loss_fn: CustomLoss
    ) -> APIFuture[types.ForwardBackwardOutput]:
        """As `forward_backward`, with a loss of your own that is computed here, in two passes. Needs torch.

        `loss_fn(data, logprobs)` gets one tensor of target log-probabilities per datum, float32 like target_tokens,
        that require gradients, and returns (scalar loss C, metrics). The second pass sends cross_entropy with weights
        -dC/dlogprob, whose gradient is that of C. In the result's metrics `loss:sum` is C.
        """
        import torch

        data = list(data)
        plain = [_without_policy_inputs(datum) for datum in data]
        submit_forward = self._prepare(plain, "cross_entropy", None, forward_only=True)

        def evaluate(forward: types.ForwardBackwardOutput) -> tuple[list[types.Datum], float, dict[str, Any]]:
            leaves = [torch.tensor(o["logprobs"].to_numpy(), requires_grad=True) for o in forward.loss_fn_outputs]
            with torch.enable_grad():
                loss, metrics = loss_fn(data, leaves)
                grads = torch.autograd.grad(loss, leaves, allow_unused=True)
            weighted = [
                _with_weights(datum, torch.zeros_like(leaf) if grad is None else -grad)
                for datum, leaf, grad in zip(plain, leaves, grads, strict=True)
            ]
            return weighted, float(loss.detach()), dict(metrics)

        async def run(link: Link) -> types.ForwardBackwardOutput:
            async with self._order.turn:  # held over both passes: what is called later comes after them
                forward = responses.forward_backward(await link.wait_operation(await submit_forward(link)))
                weighted, loss, metrics = await asyncio.to_thread(evaluate, forward)
                operation = await self._prepare(weighted, "cross_entropy", None, forward_only=False)(link)
            output = responses.forward_backward(await link.wait_operation(operation))
            return types.ForwardBackwardOutput(
                loss_fn_output_type=output.loss_fn_output_type,
                loss_fn_outputs=output.loss_fn_outputs,
                metrics=responses.merge_metrics(output.metrics, metrics, loss),
            )

        return self._connection.submit(run(self._connection.link))

    @checked
    def optim_step(
        self, optim_params: types.AdamParams | None = None, *, adam_params: types.AdamParams | None = None
    ) -> APIFuture[types.OptimStepResponse]:
        """One optimizer step over the accumulated gradient, which is then cleared."""
        if (optim_params is None) == (adam_params is None):
            raise TypeError("optim_step() takes optim_params or its alias adam_params, and exactly one of them")
        params = optim_params if optim_params is not None else adam_params
        assert params is not None
        request = requests.OptimStepRequest(adam=requests.adam_params(params))
        return self._call("OptimStep", request, responses.optim_step)

    @checked
    def save_state(
        self,
        name: str,
        ttl_seconds: int | None = None,
        overwrite: bool = False,
        user_metadata: Mapping[str, str] | None = None,
    ) -> APIFuture[types.SaveWeightsResponse]:
        """Saves weights and optimizer state; `path` loads or forks them. A taken name needs `overwrite`."""
        request = requests.SaveCheckpointRequest(
            name=name, ttl_seconds=ttl_seconds, overwrite=overwrite, user_metadata=user_metadata
        )
        return self._call("SaveCheckpoint", request, responses.saved_checkpoint)

    @checked
    def load_state(self, path: str) -> APIFuture[types.LoadWeightsResponse]:
        """Replaces the weights by those of a checkpoint or snapshot; the optimizer starts afresh."""
        return self._call("LoadState", requests.LoadStateRequest(uri=path), responses.loaded)

    @checked
    def load_state_with_optimizer(self, path: str) -> APIFuture[types.LoadWeightsResponse]:
        """Replaces weights and optimizer state by those of a checkpoint."""
        request = requests.LoadStateRequest(uri=path, with_optimizer=True)
        return self._call("LoadState", request, responses.loaded)

    @checked
    def save_weights_for_sampler(
        self, name: str, ttl_seconds: int | None = None, user_metadata: Mapping[str, str] | None = None
    ) -> APIFuture[types.SaveWeightsForSamplerResponse]:
        """Publishes the weights as the next immutable snapshot version, kept until deleted."""
        if not name:
            raise ValueError("name is empty; save_weights_and_get_sampling_client publishes without one")
        request = requests.PublishSnapshotRequest(name=name, ttl_seconds=ttl_seconds, user_metadata=user_metadata)
        return self._call("PublishSnapshot", request, responses.published)

    @checked
    def save_weights_and_get_sampling_client(self, name: str | None = None) -> APIFuture[SamplingClient]:
        """Publishes the weights and binds a sampler to them.

        Without a name the snapshot is temporary: it lives in memory while a sampler is bound
        to it. With one it is kept.
        """
        publish = self._call("PublishSnapshot", requests.PublishSnapshotRequest(name=name or ""), responses.published)
        connection = self._connection

        async def create() -> SamplingClient:
            published = await publish
            return await open_sampler(connection, uri=published.path)

        return connection.submit(create(), client=True)

    @checked
    def create_sampling_client(self, model_path: str) -> APIFuture[SamplingClient]:
        """A sampler of any snapshot on the same server."""
        connection = self._connection

        async def create() -> SamplingClient:
            return await open_sampler(connection, uri=model_path)

        return connection.submit(create(), client=True)

    def get_info(self) -> APIFuture[types.GetInfoResponse]:
        """What the adapter is."""

        async def info() -> types.GetInfoResponse:
            models = {model.model_name: model.arch for model in self._info.supported_models}
            return responses.adapter_info(self._adapter, models.get(self._adapter.base_model, ""))

        return self._connection.submit(info(), client=True)

    def get_tokenizer(self) -> Any:
        """The base model's tokenizer, served by the server."""
        return load_tokenizer(self._connection, self._adapter.base_model)

    def unload(self) -> APIFuture[types.UnloadResponse]:
        """Frees the adapter's place on the server after all earlier calls; what is saved stays."""
        return self._call("UnloadAdapter", requests.UnloadAdapterRequest(), responses.unloaded)


def _without_policy_inputs(datum: types.Datum) -> types.Datum:
    """Only what cross_entropy takes; the other inputs are the custom loss's own and stay here."""
    if "target_tokens" not in datum.loss_fn_inputs:
        raise ValueError("target_tokens is missing from loss_fn_inputs")
    kept = {key: datum.loss_fn_inputs[key] for key in ("target_tokens", "weights") if key in datum.loss_fn_inputs}
    return types.Datum(model_input=datum.model_input, loss_fn_inputs=kept)


def _with_weights(datum: types.Datum, weights: Any) -> types.Datum:
    inputs = {"target_tokens": datum.loss_fn_inputs["target_tokens"], "weights": types.TensorData.from_torch(weights)}
    return types.Datum(model_input=datum.model_input, loss_fn_inputs=inputs)
