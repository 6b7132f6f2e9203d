"""A real worker process on the T0 model, shared by the tests of this folder, and a driver for it."""

import asyncio
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

from opentinker_client.wire.v1 import datum_pb2, policy_pb2, sampling_pb2, tensor_pb2, training_pb2
from opentinker_server.backends.base import Worker
from opentinker_server.backends.local import LocalBackend
from opentinker_server.workers.config import TrainerLimits, WorkerConfig
from opentinker_server.workers.v1 import worker_pb2

T = TypeVar("T")
MICRO_BATCH_TOKENS = 128


def tensor(values: Any, dtype: type = np.float32) -> tensor_pb2.Tensor:
    array = np.asarray(values, dtype=dtype)
    kinds = {np.float32: tensor_pb2.DTYPE_FLOAT32, np.int64: tensor_pb2.DTYPE_INT64}
    return tensor_pb2.Tensor(data=array.tobytes(), dtype=kinds[dtype], shape=array.shape)


def tokens_bytes(tokens: Any) -> bytes:
    return np.asarray(tokens, dtype="<i4").tobytes()


def model_input(tokens: Any) -> datum_pb2.ModelInput:
    return datum_pb2.ModelInput(chunks=[datum_pb2.Chunk(text=datum_pb2.TextChunk(tokens=tokens_bytes(tokens)))])


class Driver:
    """Runs the event loop between awaits of a test, and knows how commands look."""

    def __init__(self, runner: asyncio.Runner, worker: Worker) -> None:
        self.runner = runner
        self.worker = worker
        self._num_adapters = 0

    def run(self, awaitable: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(awaitable)

    def call(self, command: worker_pb2.WorkerCommand) -> worker_pb2.WorkerReply:
        return self.run(self.worker.call(command))

    def new_adapter(self, *, rank: int = 4, seed: int = 1, directory: str = "", with_optimizer: bool = False) -> str:
        self._num_adapters += 1
        adapter_id = f"a-{self._num_adapters}"
        self.call(
            worker_pb2.WorkerCommand(
                create_adapter=worker_pb2.CreateAdapter(
                    adapter_id=adapter_id,
                    lora=policy_pb2.LoraConfig(rank=rank, seed=seed),
                    directory=directory,
                    with_optimizer=with_optimizer,
                )
            )
        )
        return adapter_id

    def trained_adapter(self, steps: int = 1) -> str:
        """An adapter that differs from the base model."""
        adapter_id = self.new_adapter()
        for _ in range(steps):
            self.call(self.forward_backward(adapter_id, [self.datum(range(8))]))
            self.call(self.optim_step(adapter_id, learning_rate=0.02))
        return adapter_id

    def stats(self) -> dict[str, float]:
        return dict(self.call(worker_pb2.WorkerCommand(get_stats=worker_pb2.GetStats())).stats.values)

    @staticmethod
    def datum(tokens: Any, *, weights: Any = None) -> datum_pb2.Datum:
        """Each token predicts the next one; tokens [n] give n - 1 rows."""
        tokens = list(tokens)
        return datum_pb2.Datum(
            model_input=model_input(tokens[:-1]),
            target_tokens=tensor(tokens[1:], np.int64),
            weights=None if weights is None else tensor(weights),
        )

    @staticmethod
    def forward_backward(
        adapter_id: str,
        data: list[datum_pb2.Datum],
        *,
        loss_fn: str = "cross_entropy",
        forward_only: bool = False,
        config: dict[str, float] | None = None,
    ) -> worker_pb2.WorkerCommand:
        return worker_pb2.WorkerCommand(
            forward_backward=worker_pb2.ForwardBackward(
                adapter_id=adapter_id,
                loss_fn=loss_fn,
                loss_fn_config={
                    key: training_pb2.LossConfigValue(number=value) for key, value in (config or {}).items()
                },
                forward_only=forward_only,
                data=data,
            )
        )

    def logprobs(self, adapter_id: str, tokens: Any) -> np.ndarray:
        """float32 [n - 1]: of each token given those before it."""
        reply = self.call(self.forward_backward(adapter_id, [self.datum(tokens)], forward_only=True))
        return np.frombuffer(reply.forward_backward.outputs[0].tensors["logprobs"].data, np.float32)

    @staticmethod
    def optim_step(adapter_id: str, **adam: float) -> worker_pb2.WorkerCommand:
        return worker_pb2.WorkerCommand(
            optim_step=worker_pb2.OptimStep(adapter_id=adapter_id, adam=training_pb2.AdamParams(**adam))
        )

    def publish(self, adapter_id: str, key: str, directory: str = "") -> worker_pb2.SavedFiles:
        return self.call(
            worker_pb2.WorkerCommand(
                publish_snapshot=worker_pb2.PublishSnapshot(
                    adapter_id=adapter_id, snapshot_key=key, directory=directory
                )
            )
        ).saved

    @staticmethod
    def sample(
        prompt: Any, *, key: str = "", stream: bool = False, num_samples: int = 1, max_tokens: int = 8, **params: Any
    ) -> worker_pb2.WorkerCommand:
        return worker_pb2.WorkerCommand(
            sample=worker_pb2.Sample(
                snapshot_key=key,
                request=sampling_pb2.SampleRequest(
                    prompt=model_input(prompt),
                    num_samples=num_samples,
                    params=sampling_pb2.SamplingParams(max_tokens=max_tokens, **params),
                ),
                stream=stream,
            )
        )


def worker_config(model: Path | str, cache_dir: Path) -> WorkerConfig:
    return WorkerConfig(
        model=str(model),
        cache_dir=str(cache_dir),
        threads=1,
        trainer=TrainerLimits(max_tokens_per_micro_batch=MICRO_BATCH_TOKENS),
    )


@pytest.fixture(scope="session")
def t0_config(t0_dir: Path, cache_dir: Path) -> WorkerConfig:
    """Of a worker on T0 whose micro-batches hold MICRO_BATCH_TOKENS tokens."""
    return worker_config(t0_dir, cache_dir)


@pytest.fixture(scope="session")
def driver(t0_config: WorkerConfig) -> Iterator[Driver]:
    with asyncio.Runner() as runner:
        worker = runner.run(LocalBackend().start_worker(t0_config))
        yield Driver(runner, worker)
        runner.run(worker.stop())
