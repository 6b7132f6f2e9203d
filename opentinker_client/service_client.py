"""The entry point: makes training, sampling and registry clients of one server."""

from __future__ import annotations

import uuid
import warnings
from collections.abc import Mapping
from typing import Any

from opentinker_client import types
from opentinker_client.arguments import checked, with_async_names
from opentinker_client.futures import APIFuture
from opentinker_client.registry_client import RegistryClient
from opentinker_client.sampling_client import SamplingClient, open_sampler
from opentinker_client.training_client import TrainingClient
from opentinker_client.transport.connection import Connection, Link
from opentinker_client.wire import requests


@with_async_names(
    results=(
        "create_lora_training_client",
        "create_training_client_from_state",
        "create_training_client_from_state_with_optimizer",
        "create_sampling_client",
        "attach",
        "get_server_capabilities",
        "close",
    )
)
class ServiceClient:
    """A connection to a server, opened at first use.

    base_url: HOST:PORT or grpc://HOST:PORT; None takes OPENTINKER_BASE_URL, else 127.0.0.1:8711. Adapters and samplers
    made here live until they are unloaded, or this client is closed or collected; what is saved stays. A program that
    dies of an exception leaves them for the time of the session's lease, so that `attach` can take them up. api_key and
    project_id are Tinker's; they are taken with a warning that they have no effect here.
    """

    @checked
    def __init__(
        self,
        user_metadata: Mapping[str, str] | None = None,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        project_id: str | None = None,
    ):
        for name, value in (("api_key", api_key), ("project_id", project_id)):
            if value is not None:
                warnings.warn(f"{name} has no effect: this server has no {name}s", stacklevel=3)
        self._connection = Connection(base_url)
        self._user_metadata = dict(user_metadata or {})

    @property
    def address(self) -> str:
        """host:port of the server."""
        return self._connection.address

    @checked
    def create_lora_training_client(
        self,
        base_model: str,
        rank: int = 32,
        seed: int | None = None,
        train_mlp: bool = True,
        train_attn: bool = True,
        train_unembed: bool = True,
        user_metadata: Mapping[str, str] | None = None,
        *,
        alpha: float = 32.0,
        use_rslora: bool = False,
    ) -> APIFuture[TrainingClient]:
        """A new adapter on a base model. seed: same seed, same initial weights; None lets the server choose.

        The scale of the adapter is alpha / rank, or alpha / sqrt(rank) with use_rslora.
        """
        if not (train_mlp or train_attn or train_unembed):
            raise ValueError("train_mlp, train_attn and train_unembed are all false: nothing to train")
        lora = types.LoraConfig(
            rank=rank,
            seed=seed,
            train_unembed=train_unembed,
            train_mlp=train_mlp,
            train_attn=train_attn,
            alpha=alpha,
            use_rslora=use_rslora,
        )
        request = requests.CreateAdapterRequest(base_model=base_model, lora=requests.lora_config(lora))
        return self._create(request, user_metadata)

    @checked
    def create_training_client_from_state(
        self, path: str, base_model: str | None = None, user_metadata: Mapping[str, str] | None = None
    ) -> APIFuture[TrainingClient]:
        """A new adapter with the weights of a checkpoint or snapshot and a fresh optimizer."""
        return self._create(requests.CreateAdapterRequest(base_model=base_model or "", from_uri=path), user_metadata)

    @checked
    def create_training_client_from_state_with_optimizer(
        self, path: str, base_model: str | None = None, user_metadata: Mapping[str, str] | None = None
    ) -> APIFuture[TrainingClient]:
        """A new adapter with the weights and the optimizer state of a checkpoint."""
        request = requests.CreateAdapterRequest(base_model=base_model or "", from_uri=path, with_optimizer=True)
        return self._create(request, user_metadata)

    def _create(self, request: Any, user_metadata: Mapping[str, str] | None) -> APIFuture[TrainingClient]:
        request.client_key = uuid.uuid4().hex
        request.user_metadata.update(user_metadata or {})
        connection = self._connection

        async def create(link: Link) -> TrainingClient:
            info = await link.server_info()
            request.session_id = await link.session_id(self._user_metadata)
            response = await link.call("training", "CreateAdapter", request)
            operation = await link.wait_operation(response.operation)
            return TrainingClient(connection, operation.adapter, info, next_seq_id=1)

        return connection.submit(create(connection.link), client=True)

    @checked
    def attach(self, adapter_id: str) -> APIFuture[TrainingClient]:
        """Takes a live adapter up again, whose client is gone; its gradient and optimizer are as they were.

        The adapter belongs to this client from now on. Two clients must not train one adapter at the same time.
        """
        connection = self._connection

        async def attach(link: Link) -> TrainingClient:
            info = await link.server_info()
            session_id = await link.session_id(self._user_metadata)
            request = requests.AttachAdapterRequest(session_id=session_id, adapter_id=adapter_id)
            adapter = (await link.call("training", "AttachAdapter", request)).adapter
            return TrainingClient(connection, adapter, info, next_seq_id=adapter.next_seq_id)

        return connection.submit(attach(connection.link), client=True)

    @checked
    def create_sampling_client(
        self, model_path: str | None = None, base_model: str | None = None
    ) -> APIFuture[SamplingClient]:
        """A sampler of a snapshot (model_path, an opentinker:// path) or of the base model itself."""
        if (model_path is None) == (base_model is None):
            raise ValueError("give either model_path (a snapshot) or base_model")
        connection = self._connection

        async def create() -> SamplingClient:
            return await open_sampler(connection, uri=model_path, base_model=base_model, metadata=self._user_metadata)

        return connection.submit(create(), client=True)

    def create_registry_client(self) -> RegistryClient:
        """What the server keeps, over the same connection."""
        return RegistryClient(connection=self._connection)

    create_rest_client = create_registry_client

    def get_server_capabilities(self) -> APIFuture[types.GetServerCapabilitiesResponse]:
        """What the server is and offers."""
        return self._connection.submit(self._connection.link.server_info())

    def close(self) -> APIFuture[None]:
        """Ends the session: what it holds live is unloaded, what is saved stays."""
        return self._connection.close()

    def __enter__(self) -> ServiceClient:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._connection.close(end_session=kind is None).result()
