"""Which sequences run in a step, and which tokens of them.

Decode rows of all running sequences come first, then chunks of prompts, within one token budget. Older
requests go before newer ones everywhere; when the cache is full the newest running sequence gives way and is
computed again later, so the oldest always gets on.
"""

import bisect
from dataclasses import dataclass

from opentinker_server.sampler.kv_cache import SlabCache
from opentinker_server.sampler.sequence import Request, Sequence


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """Consecutive tokens of one sequence to compute in a step."""

    sequence: Sequence
    start: int
    num_tokens: int

    @property
    def end(self) -> int:
        """Position after the last token."""
        return self.start + self.num_tokens

    @property
    def is_last(self) -> bool:
        """Whether no known token remains after it, so that its last row yields the next token."""
        return self.end == self.sequence.num_tokens


class SequenceScheduler:
    """Queues of waiting and running sequences, both in order of arrival."""

    def __init__(self, cache: SlabCache, *, max_running: int, max_batched_tokens: int) -> None:
        """Each running sequence must be able to take a row, so max_batched_tokens bounds their number too."""
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self._cache = cache
        self._max_running = min(max_running, max_batched_tokens)
        self._max_batched_tokens = max_batched_tokens

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence that holds no slab."""
        assert sequence.slab is None
        bisect.insort(self.waiting, sequence)

    def schedule(self) -> list[Chunk]:
        """The next step's work; empty when nothing is queued."""
        num_preemptions = self.num_preemptions
        chunks = self._decode_chunks()
        budget = self._max_batched_tokens - len(chunks)
        for sequence in self.running:
            if sequence.num_pending > 1 and budget > 0:
                chunks.append(_chunk(sequence, budget))
                budget -= chunks[-1].num_tokens
        # Memory was short a moment ago: what is taken in now would be the next to give way.
        may_admit = self.num_preemptions == num_preemptions
        while may_admit and self.waiting and budget > 0 and len(self.running) < self._max_running:
            if not self._cache.fits(self.waiting[0].num_tokens):
                break
            chunks.append(_chunk(self._admit(self.waiting.pop(0)), budget))
            budget -= chunks[-1].num_tokens
        return chunks

    def finish(self, sequence: Sequence) -> None:
        """Removes a sequence; a waiting sample of the same prompt takes its slab over."""
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        if sequence.slab is None:
            return
        self.running.remove(sequence)
        heir = next((other for other in self.waiting if other.request is sequence.request), None)
        slab, sequence.slab = sequence.slab, None
        prompt_is_computed = sequence.num_computed >= sequence.num_prompt_tokens
        if heir is not None and prompt_is_computed and heir.num_tokens <= slab.capacity:
            self.waiting.remove(heir)
            heir.slab, heir.num_computed = slab, heir.num_prompt_tokens
            bisect.insort(self.running, heir)
        else:
            self._cache.free(slab)

    def remove(self, request: Request) -> None:
        """Removes every sequence of a request and frees what they hold."""
        self.waiting = [sequence for sequence in self.waiting if sequence.request is not request]
        for sequence in request.sequences:
            self.finish(sequence)

    def _decode_chunks(self) -> list[Chunk]:
        chunks = []
        for sequence in list(self.running):
            # A preempted sequence has left `running`; victims are never older than the current one.
            if sequence.slab is None or sequence.num_pending > 1:
                continue
            if self._make_room(sequence):
                chunks.append(_chunk(sequence, 1))
        return chunks

    def _make_room(self, sequence: Sequence) -> bool:
        """Grows the slab for the pending token; False when the sequence itself had to give way."""
        assert sequence.slab is not None
        if sequence.num_tokens <= sequence.slab.capacity:
            return True
        while not self._cache.fits(sequence.num_tokens, instead_of=sequence.slab):
            victim = self.running[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
        sequence.slab = self._cache.grow(sequence.slab, sequence.num_tokens)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        assert sequence.slab is not None
        self.num_preemptions += 1
        self.running.remove(sequence)
        self._cache.free(sequence.slab)
        sequence.slab, sequence.num_computed = None, 0
        self.add(sequence)

    def _admit(self, sequence: Sequence) -> Sequence:
        """Gives a slab, with the prompt copied from a sample of the same request that has computed it."""
        num_prompt = sequence.num_prompt_tokens
        donor = None
        if sequence.num_tokens > num_prompt:
            siblings = (other for other in self.running if other.request is sequence.request)
            donor = next((other for other in siblings if other.num_computed >= num_prompt), None)
        if donor is None:
            sequence.slab = self._cache.allocate(sequence.num_tokens)
        else:
            sequence.slab = self._cache.allocate(sequence.num_tokens, prefix_of=donor.slab, num_copied=num_prompt)
            sequence.num_computed = num_prompt
        bisect.insort(self.running, sequence)
        return sequence


def _chunk(sequence: Sequence, budget: int) -> Chunk:
    return Chunk(sequence=sequence, start=sequence.num_computed, num_tokens=min(sequence.num_pending, budget))
