"""The seam between a device worker and whatever generates tokens.

Ownership: the worker's loop thread owns a `SamplerBackend` and is its only caller. The backend owns the
snapshots it was given and the requests until it reports them finished or failed. Nothing here blocks except
`step`, which runs one bounded unit of device work.

Shape legend: P prompt tokens, T generated tokens, K entries of a top-k list.
"""

import math
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np

from opentinker_server.models.lora import LoraWeights

MISSING_TOPK_LOGPROB = -99999.0
"""Log-probability of the placeholder entries at prompt position 0, which nothing predicts."""


class SamplingError(Exception):
    """A request, or a snapshot, that cannot be served; only that one is affected.

    `reason` is the name of an `opentinker.v1.ErrorReason` without its prefix; `expected`, `actual` and
    `limit` are sizes in tokens unless the message says otherwise, None where they do not apply.
    """

    def __init__(
        self,
        message: str,
        *,
        reason: str,
        field: str = "",
        expected: int | None = None,
        actual: int | None = None,
        limit: int | None = None,
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.field = field
        self.expected = expected
        self.actual = actual
        self.limit = limit


def _refuse(field: str, requirement: str, value: object) -> SamplingError:
    return SamplingError(f"{field} must be {requirement}, got {value}", reason="INVALID_ARGUMENT", field=field)


@dataclass(frozen=True, kw_only=True)
class SamplingSettings:
    """How to generate. Values out of range raise `SamplingError`."""

    max_tokens: int
    """Most tokens to generate, at least 1."""
    seed: int
    """In [0, 2**64). Noise depends on (seed, sample index, position) only."""
    temperature: float = 1.0
    """At least 0; 0 is greedy."""
    top_k: int = -1
    """Keep exactly the k most likely tokens, ties to the lower id; -1 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens whose mass reaches top_p, in (0, 1]."""
    stop_token_ids: frozenset[int] = frozenset()
    """Ids that end a sample; the id itself is returned. The caller puts the model's end ids here."""
    stop_texts: tuple[str, ...] = ()
    """Texts that end a sample, each non-empty; the token that completes one is returned whole."""
    logprobs_mode: Literal["model", "processed"] = "model"
    """"model": the untempered distribution. "processed": after temperature, top-k and top-p."""

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise _refuse("max_tokens", "at least 1", self.max_tokens)
        if not 0 <= self.seed < 2**64:
            raise _refuse("seed", "in [0, 2**64)", self.seed)
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise _refuse("temperature", "finite and at least 0", self.temperature)
        if self.top_k != -1 and self.top_k < 1:
            raise _refuse("top_k", "-1 or at least 1", self.top_k)
        if not 0 < self.top_p <= 1:
            raise _refuse("top_p", "in (0, 1]", self.top_p)
        if "" in self.stop_texts:
            raise _refuse("stop_texts", "non-empty texts", list(self.stop_texts))
        if self.logprobs_mode not in ("model", "processed"):
            raise _refuse("logprobs_mode", '"model" or "processed"', self.logprobs_mode)


@dataclass(kw_only=True)
class SampleTask:
    """One sampling request."""

    task_id: int
    """Chosen by the caller, unique among unfinished requests."""
    snapshot_key: str = ""
    """Weights to use; empty is the base model."""
    prompt: np.ndarray
    """int64 [P], P at least 1."""
    num_samples: int = 1
    """Independent samples, at least 1. They share the computation of the prompt."""
    settings: SamplingSettings
    """How to generate."""
    prompt_logprobs: bool = False
    """Report the log-probability of every prompt token."""
    topk_prompt: int = 0
    """Most likely tokens to report per prompt position; 0 for none."""
    topk_sample: int = 0
    """Most likely tokens to report per generated position; 0 for none."""
    stream: bool = False
    """Report tokens as they come."""


@dataclass(frozen=True, kw_only=True)
class TopkLogprobs:
    """The most likely tokens per position, most likely first, ties to the lower id."""

    token_ids: np.ndarray
    """int32 [positions, K]."""
    logprobs: np.ndarray
    """float32 [positions, K], natural log."""


StopReason = Literal["stop", "length"]


@dataclass(frozen=True, kw_only=True)
class SampledSequence:
    """One finished sample."""

    tokens: np.ndarray
    """int32 [T]; a matched stop token is included."""
    logprobs: np.ndarray
    """float32 [T], natural log, of the distribution `logprobs_mode` names."""
    stop_reason: StopReason
    """"stop" when a stop rule matched, also on the last allowed token; else "length"."""
    topk: TopkLogprobs | None = None
    """T positions, of the same distribution as `logprobs`; outside its support -inf."""


@dataclass(frozen=True, kw_only=True)
class SampleOutput:
    """The whole answer to a `SampleTask`."""

    sequences: list[SampledSequence] = field(default_factory=list)
    """num_samples of them, by sample index."""
    prompt_logprobs: np.ndarray | None = None
    """float32 [P], natural log, untempered; NaN at index 0."""
    topk_prompt: TopkLogprobs | None = None
    """P positions, untempered; position 0 holds token 0 with MISSING_TOPK_LOGPROB."""
    prompt_cache_hit_tokens: int = 0
    """Prompt tokens taken from another request's computation; sharing among samples does not count."""


@dataclass(frozen=True, kw_only=True)
class Delta:
    """Next tokens of one sample; only for tasks with `stream`."""

    task_id: int
    sample_index: int
    tokens: np.ndarray
    """int32 [n]."""
    logprobs: np.ndarray
    """float32 [n]."""
    stop_reason: StopReason | None = None
    """Set on the last delta of the sample."""


@dataclass(frozen=True, kw_only=True)
class Finished:
    """The last event of a task that succeeded."""

    task_id: int
    output: SampleOutput


@dataclass(frozen=True, kw_only=True)
class Failed:
    """The last event of a task that failed."""

    task_id: int
    error: SamplingError


SampleEvent = Delta | Finished | Failed


class SamplerBackend(Protocol):
    """Generates for many requests at once, over many snapshots."""

    def add_snapshot(self, key: str, weights: LoraWeights) -> None:
        """Makes `weights` known under `key`; the caller never changes their tensors afterwards.

        A known key is left as it is, since a key names immutable content. Raises `SamplingError` when the
        weights do not fit the base model or a limit.
        """

    def drop_snapshot(self, key: str) -> None:
        """Forgets `key` for new requests; running ones finish with its weights, then memory is freed.

        Raises `SamplingError` with NOT_FOUND for an unknown key.
        """

    def has_snapshot(self, key: str) -> bool:
        """Whether new requests may name `key`."""

    def add(self, task: SampleTask) -> None:
        """Queues a request. Raises `SamplingError` when it can never be served; nothing is queued then."""

    def cancel(self, task_id: int) -> None:
        """Ends a request and frees what it holds; no further event names it. Unknown ids are ignored."""

    def has_work(self) -> bool:
        """Whether `step` has something to do."""

    def step(self) -> list[SampleEvent]:
        """Runs one unit of work and reports what came of it, in order."""

    def stats(self) -> dict[str, float]:
        """Counters and gauges by name."""
