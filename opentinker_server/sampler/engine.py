"""The sampler engine: continuous batching over versioned snapshots. Implements `base.SamplerBackend`."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from opentinker_server.models.base import BaseModel
from opentinker_server.models.lora import LoraWeights
from opentinker_server.sampler.base import (
    Delta,
    Failed,
    Finished,
    SampleEvent,
    SampleTask,
    SamplingError,
)
from opentinker_server.sampler.kv_cache import SlabCache
from opentinker_server.sampler.model_runner import Draw, ModelRunner, ScoredPrompt, StepOutput
from opentinker_server.sampler.scheduler import Chunk, SequenceScheduler
from opentinker_server.sampler.sequence import Request, Sequence
from opentinker_server.sampler.snapshots import SnapshotTable
from opentinker_server.sampler.stop import StopTextMatcher


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Limits of the engine. Requests beyond them wait; one that can never fit is refused."""

    max_running: int = 64
    """Most sequences that generate at once; further ones wait."""
    max_batched_tokens: int = 512
    """Most tokens in a step, decode rows and prompt chunks together. Also bounds the running sequences."""
    kv_cache_tokens: int = 65536
    """Capacity of the key/value cache, in tokens of all running sequences together."""
    max_lora_rank: int = 256
    """Highest adapter rank that is accepted."""

    def __post_init__(self) -> None:
        for name in ("max_running", "max_batched_tokens", "kv_cache_tokens", "max_lora_rank"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")


class SamplerEngine:
    """Generates for many requests at once. One thread only."""

    def __init__(self, base: BaseModel, config: EngineConfig) -> None:
        self._base = base
        self._config = config
        self._cache = SlabCache(
            num_layers=base.info.num_layers,
            num_kv_heads=base.info.num_kv_heads,
            head_dim=base.info.head_dim,
            dtype=base.dtype,
            device=base.device,
            capacity_tokens=config.kv_cache_tokens,
            max_sequences=config.max_running,
            max_sequence_tokens=base.info.max_context_length,
        )
        self._scheduler = SequenceScheduler(
            self._cache, max_running=config.max_running, max_batched_tokens=config.max_batched_tokens
        )
        self._snapshots = SnapshotTable(
            lora_shapes=base.lora_shapes, dtype=base.dtype, device=base.device, max_lora_rank=config.max_lora_rank
        )
        self._runner = ModelRunner(base)
        self._requests: dict[int, Request] = {}
        self._num_added = 0
        self._num_steps = 0
        self._num_generated = 0
        self._num_prefilled = 0

    def step(self) -> list[SampleEvent]:
        """Schedules, runs and postprocesses one step."""
        chunks = self._scheduler.schedule()
        if not chunks:
            return []
        output = self._runner.run(chunks)
        return self._postprocess(chunks, output)

    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self._requests)

    def add(self, task: SampleTask) -> None:
        """Queues a request; raises `SamplingError` when it can never be served."""
        assert task.task_id not in self._requests
        self._check(task)
        self._num_added += 1
        request = Request(task, snapshot=self._snapshots.acquire(task.snapshot_key), order=self._num_added)
        if task.settings.stop_texts:
            for sequence in request.sequences:
                sequence.stop_texts = StopTextMatcher(
                    task.settings.stop_texts, tokenizer=self._tokenizer, prompt_tail=request.prompt
                )
        self._requests[task.task_id] = request
        # The other samples join when the first has computed the prompt.
        self._scheduler.add(request.sequences[0])

    def cancel(self, task_id: int) -> None:
        """Frees a request at once; unknown ids are ignored."""
        if task_id in self._requests:
            self._forget(self._requests[task_id])

    def add_snapshot(self, key: str, weights: LoraWeights) -> None:
        """Makes weights known under a key; a known key is left as it is."""
        self._snapshots.add(key, weights)

    def drop_snapshot(self, key: str) -> None:
        """Refuses new requests for the key; memory is freed after the last running one."""
        self._snapshots.drop(key)

    def has_snapshot(self, key: str) -> bool:
        """Whether new requests may name the key."""
        return key in self._snapshots

    def stats(self) -> dict[str, float]:
        """Gauges: running, waiting (sequences), requests, cache tokens, snapshots. The rest are counters."""
        return {
            "running": len(self._scheduler.running),
            "waiting": len(self._scheduler.waiting),
            "requests": len(self._requests),
            "cache_tokens_total": self._cache.capacity_tokens,
            "cache_tokens_free": self._cache.free_tokens,
            "snapshots": len(self._snapshots),
            "snapshots_dropped_in_use": self._snapshots.num_dropped_in_use,
            "snapshot_bytes": self._snapshots.size_bytes,
            "steps": self._num_steps,
            "tokens_generated": self._num_generated,
            "prompt_tokens_computed": self._num_prefilled,
            "preemptions": self._scheduler.num_preemptions,
        }

    @cached_property
    def _tokenizer(self) -> PreTrainedTokenizerBase:
        return AutoTokenizer.from_pretrained(self._base.info.tokenizer_directory)

    def _check(self, task: SampleTask) -> None:
        info = self._base.info
        num_prompt, max_tokens = len(task.prompt), task.settings.max_tokens
        if num_prompt < 1:
            raise SamplingError("prompt is empty", reason="INVALID_ARGUMENT", field="prompt", expected=1, actual=0)
        if task.num_samples < 1:
            raise SamplingError(
                f"num_samples must be at least 1, got {task.num_samples}",
                reason="INVALID_ARGUMENT",
                field="num_samples",
                expected=1,
                actual=task.num_samples,
            )
        wrong = np.flatnonzero((task.prompt < 0) | (task.prompt >= info.vocab_size))
        if wrong.size:
            raise SamplingError(
                f"prompt token {task.prompt[wrong[0]]} at position {wrong[0]} is outside the vocabulary of "
                f"{info.vocab_size}",
                reason="INVALID_ARGUMENT",
                field="prompt",
                actual=int(task.prompt[wrong[0]]),
                limit=info.vocab_size,
            )
        if num_prompt + max_tokens > info.max_context_length:
            raise SamplingError(
                f"prompt of {num_prompt} tokens plus max_tokens {max_tokens} exceeds the context of "
                f"{info.max_context_length}",
                reason="CONTEXT_LENGTH",
                field="max_tokens",
                actual=num_prompt + max_tokens,
                limit=info.max_context_length,
            )
        if num_prompt + max_tokens - 1 > self._cache.max_sequence_tokens:
            raise SamplingError(
                f"prompt of {num_prompt} tokens plus max_tokens {max_tokens} can never fit the sampler's "
                f"cache of {self._config.kv_cache_tokens} tokens",
                reason="LIMIT_EXCEEDED",
                field="max_tokens",
                actual=num_prompt + max_tokens - 1,
                limit=self._config.kv_cache_tokens,
            )

    def _postprocess(self, chunks: list[Chunk], output: StepOutput) -> list[SampleEvent]:
        self._num_steps += 1
        for chunk in chunks:
            chunk.sequence.num_computed = chunk.end
            self._num_prefilled += max(0, min(chunk.end, chunk.sequence.num_prompt_tokens) - chunk.start)
        events: list[SampleEvent] = []
        for request in _not_finite(output):
            self._forget(request)
            message = f"the model's output under snapshot {request.snapshot.key!r} is not finite"
            error = SamplingError(message, reason="NON_FINITE", field=request.snapshot.key)
            events.append(Failed(task_id=request.task.task_id, error=error))
        for scored in output.scored_prompts:
            _store(scored)
        # Last samples first: those that just began are queued before the sample that computed their prompt
        # ends and looks for one to hand its slab to.
        for draw in reversed(output.draws):
            if draw.sequence.request.task.task_id in self._requests:
                events += self._apply(draw)
        return events

    def _apply(self, draw: Draw) -> list[SampleEvent]:
        sequence, request = draw.sequence, draw.sequence.request
        self._num_generated += 1
        sequence.append(draw.token, draw.logprob, draw.topk_ids, draw.topk_logprobs)
        events: list[SampleEvent] = []
        if request.task.stream:
            events.append(_delta(sequence))
        if sequence.stop_reason is not None:
            self._scheduler.finish(sequence)
            request.num_unfinished -= 1
            if request.num_unfinished == 0:
                self._forget(request)
                events.append(Finished(task_id=request.task.task_id, output=request.output()))
        elif sequence.slab is None:
            self._scheduler.add(sequence)
        return events

    def _forget(self, request: Request) -> None:
        self._scheduler.remove(request)
        self._snapshots.release(request.snapshot)
        del self._requests[request.task.task_id]


def _not_finite(output: StepOutput) -> list[Request]:
    drawn = [draw.sequence.request for draw in output.draws if np.isnan(draw.logprob)]
    scored = [item.request for item in output.scored_prompts if np.isnan(item.logprobs).any()]
    return list(dict.fromkeys(drawn + scored))


def _store(scored: ScoredPrompt) -> None:
    scores = scored.request.scores
    assert scores is not None
    positions = slice(scored.first, scored.first + len(scored.logprobs))
    scores.logprobs_P[positions] = scored.logprobs
    scores.topk_ids_PK[positions] = scored.topk_ids
    scores.topk_logprobs_PK[positions] = scored.topk_logprobs
    scores.num_scored = positions.stop


def _delta(sequence: Sequence) -> Delta:
    """The token that was appended last."""
    return Delta(
        task_id=sequence.request.task.task_id,
        sample_index=sequence.sample_index,
        tokens=np.array(sequence.generated[-1:], dtype=np.int32),
        logprobs=np.array(sequence.logprobs[-1:], dtype=np.float32),
        stop_reason=sequence.stop_reason,
    )
