"""Requests and their sequences: everything that is known of one sample."""

from dataclasses import dataclass, field

import numpy as np

from opentinker_server.sampler.base import (
    MISSING_TOPK_LOGPROB,
    SampledSequence,
    SampleOutput,
    SampleTask,
    StopReason,
    TopkLogprobs,
)
from opentinker_server.sampler.kv_cache import Slab
from opentinker_server.sampler.snapshots import Snapshot
from opentinker_server.sampler.stop import StopTextMatcher


@dataclass(eq=False, kw_only=True)
class PromptScores:
    """Log-probabilities of a prompt, filled chunk by chunk; the first `num_scored` positions are known."""

    logprobs_P: np.ndarray
    topk_ids_PK: np.ndarray
    topk_logprobs_PK: np.ndarray
    num_scored: int = 1

    @classmethod
    def empty(cls, num_tokens: int, topk: int) -> "PromptScores":
        return cls(
            logprobs_P=np.full(num_tokens, np.nan, dtype=np.float32),
            topk_ids_PK=np.zeros((num_tokens, topk), dtype=np.int32),
            topk_logprobs_PK=np.full((num_tokens, topk), MISSING_TOPK_LOGPROB, dtype=np.float32),
        )


class Request:
    """A task, the snapshot it pins, and its sequences."""

    def __init__(self, task: SampleTask, *, snapshot: Snapshot, order: int) -> None:
        """order: increases with arrival."""
        self.task = task
        self.snapshot = snapshot
        self.order = order
        self.prompt: list[int] = [int(token) for token in task.prompt]
        self.sequences = [Sequence(self, sample_index=index) for index in range(task.num_samples)]
        self.num_unfinished = task.num_samples
        self.scores: PromptScores | None = None
        if task.prompt_logprobs or task.topk_prompt:
            self.scores = PromptScores.empty(len(self.prompt), task.topk_prompt)

    def output(self) -> SampleOutput:
        """The answer, once every sequence has finished."""
        topk_prompt = None
        if self.scores is not None and self.task.topk_prompt:
            topk_prompt = TopkLogprobs(token_ids=self.scores.topk_ids_PK, logprobs=self.scores.topk_logprobs_PK)
        wanted = self.scores is not None and self.task.prompt_logprobs
        return SampleOutput(
            sequences=[sequence.output() for sequence in self.sequences],
            prompt_logprobs=self.scores.logprobs_P if wanted and self.scores is not None else None,
            topk_prompt=topk_prompt,
        )


@dataclass(eq=False)
class Sequence:
    """One sample: the prompt, what was generated, and where its keys and values are.

    Sequences are ordered by arrival of their request, then by sample index.
    """

    request: Request
    sample_index: int
    generated: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    topk_ids: list[list[int]] = field(default_factory=list)
    topk_logprobs: list[list[float]] = field(default_factory=list)
    num_computed: int = 0
    """Tokens whose keys and values are in `slab`."""
    slab: Slab | None = None
    stop_texts: StopTextMatcher | None = None
    stop_reason: StopReason | None = None

    def __lt__(self, other: "Sequence") -> bool:
        return (self.request.order, self.sample_index) < (other.request.order, other.sample_index)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt)

    @property
    def num_tokens(self) -> int:
        """Prompt and generated tokens."""
        return len(self.request.prompt) + len(self.generated)

    @property
    def num_pending(self) -> int:
        """Known tokens that the model has yet to see; 1 while decoding."""
        return self.num_tokens - self.num_computed

    def tokens_between(self, start: int, end: int) -> list[int]:
        """Tokens at positions [start, end)."""
        num_prompt = len(self.request.prompt)
        return self.request.prompt[start:end] + self.generated[max(0, start - num_prompt) : max(0, end - num_prompt)]

    def append(self, token: int, logprob: float, topk_ids: list[int] | None, topk_logprobs: list[float] | None) -> None:
        """Adds a generated token and applies the stop rules; a match on the last slot is a stop."""
        settings = self.request.task.settings
        self.generated.append(token)
        self.logprobs.append(logprob)
        if topk_ids is not None and topk_logprobs is not None:
            num_wanted = self.request.task.topk_sample
            self.topk_ids.append(topk_ids[:num_wanted])
            self.topk_logprobs.append(topk_logprobs[:num_wanted])
        text_matched = self.stop_texts is not None and self.stop_texts.push(token)
        if token in settings.stop_token_ids or text_matched:
            self.stop_reason = "stop"
        elif len(self.generated) >= settings.max_tokens:
            self.stop_reason = "length"

    def output(self) -> SampledSequence:
        """The finished sample."""
        assert self.stop_reason is not None
        topk = None
        if self.request.task.topk_sample:
            topk = TopkLogprobs(
                token_ids=np.array(self.topk_ids, dtype=np.int32),
                logprobs=np.array(self.topk_logprobs, dtype=np.float32),
            )
        return SampledSequence(
            tokens=np.array(self.generated, dtype=np.int32),
            logprobs=np.array(self.logprobs, dtype=np.float32),
            stop_reason=self.stop_reason,
            topk=topk,
        )
