"""Continuous batching: which tokens of which sequences the next step computes, and who gives way when pages run out."""

from __future__ import annotations

import bisect
import time
from dataclasses import dataclass

import numpy as np

from decodefleet_agent.engine.batch import Batch, Span
from decodefleet_agent.engine.kv_pool import PAGE_TOKENS, KVPool, page_digest, pages_for
from decodefleet_agent.engine.sequence import Sequence


@dataclass(frozen=True)
class Limits:
    """What one step may hold."""

    max_batch: int
    max_batch_tokens: int
    chunk: int | None  # tokens of one prompt per step; None for whole prompts
    batch_size_threshold: int  # waiting sequences at which prefill goes before decode
    whole_below: int = 512  # prompts shorter than this are never cut into chunks
    reserve_tokens: int = 64  # growth that admission keeps free for each running sequence


class Scheduler:
    """Sequences wait, run (holding pages), and leave. Both lists are in order of priority, then arrival."""

    def __init__(self, limits: Limits, pool: KVPool) -> None:
        self.limits = limits
        self.pool = pool
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.preemptions = 0

    def add(self, sequence: Sequence) -> None:
        bisect.insort(self.waiting, sequence, key=lambda s: s.order)

    def schedule(self) -> Batch:
        """The next step's batch; empty where nothing can run. May preempt, by recomputation."""
        preempted = self._grow()
        budget = self.limits.max_batch_tokens
        prefill_first = len(self.waiting) >= self.limits.batch_size_threshold
        decodes = [(sequence, 1) for sequence in self.running if sequence.remaining == 1]
        if not prefill_first:
            decodes = decodes[:budget]
            budget -= len(decodes)
        prefills = self._prefill(budget, admit=not preempted)
        if prefill_first:
            decodes = decodes[: budget - sum(length for _, length in prefills)]
        return _batch(decodes + prefills)

    def finish(self, sequence: Sequence) -> None:
        """Releases a sequence that is complete; all its full pages stay in the prefix cache."""
        self._register(sequence, sequence.computed)
        self._remove(sequence)

    def cancel(self, sequence: Sequence) -> None:
        """Releases a sequence that someone ended; what it generated does not enter the prefix cache."""
        self._remove(sequence)

    def advance(self, sequence: Sequence, length: int) -> None:
        """Notes that a step computed `length` more tokens; the prompt's full pages can be shared from now on."""
        sequence.computed += length
        self._register(sequence, min(sequence.computed, sequence.prompt_length))

    def check_integrity(self) -> None:
        """Raises RuntimeError unless pool and sequences agree."""
        self.pool.check_integrity([s.pages for s in self.running])
        if any(s.pages or s.computed for s in self.waiting):
            raise RuntimeError("a waiting sequence holds pages")
        if len(self.running) > self.limits.max_batch:
            raise RuntimeError(f"{len(self.running)} sequences run, and at most {self.limits.max_batch} may")
        if any(pages_for(s.computed) > len(s.pages) for s in self.running):
            raise RuntimeError("a sequence has more computed tokens than pages")

    def _grow(self) -> bool:
        """Gives each decoding sequence the page its next token needs. The last in order gives way; True if one had to."""
        before = self.preemptions
        for sequence in list(self.running):
            while sequence in self.running and (missing := pages_for(len(sequence.tokens)) - len(sequence.pages)) > 0:
                pages = self.pool.allocate(missing)
                if pages is None:
                    self._preempt(self.running[-1])
                else:
                    sequence.pages += pages
        return self.preemptions > before

    def _prefill(self, budget: int, admit: bool) -> list[tuple[Sequence, int]]:
        work = []
        for sequence in self.running:
            if budget and sequence.remaining > 1:
                work.append((sequence, self._chunk(sequence, budget)))
                budget -= work[-1][1]
        while admit and budget and self.waiting and len(self.running) < self.limits.max_batch and self._admit(sequence := self.waiting[0]):
            work.append((sequence, self._chunk(sequence, budget)))
            budget -= work[-1][1]
        return work

    def _chunk(self, sequence: Sequence, budget: int) -> int:
        chunk = self.limits.chunk
        cut = sequence.remaining if chunk is None or len(sequence.tokens) < self.limits.whole_below else min(chunk, sequence.remaining)
        return min(cut, budget)

    def _admit(self, sequence: Sequence) -> bool:
        """Moves a waiting sequence to the running ones if the pool holds it, and the growth of those that run."""
        reusable = self._digests(sequence, (len(sequence.tokens) - 1) // PAGE_TOKENS)
        pages = self.pool.match(reusable)
        missing = pages_for(len(sequence.tokens)) - len(pages)
        reserve = sum(pages_for(min(s.output_left, self.limits.reserve_tokens)) for s in [*self.running, sequence]) if self.running else 0
        if self.pool.available < missing + reserve:
            self.pool.release(pages)
            return False
        new = self.pool.allocate(missing)
        assert new is not None
        sequence.pages = pages + new
        sequence.computed = len(pages) * PAGE_TOKENS
        if sequence.scheduled_at is None:
            sequence.scheduled_at = time.monotonic()
            sequence.cached_prompt_tokens = sequence.counted_prompt = min(sequence.computed, sequence.prompt_length)
        self.waiting.remove(sequence)
        bisect.insort(self.running, sequence, key=lambda s: s.order)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Takes a sequence's pages; its tokens are kept and computed again when it is admitted again."""
        self.preemptions += 1
        self.finish(sequence)
        self.add(sequence)

    def _remove(self, sequence: Sequence) -> None:
        if sequence in self.waiting:
            self.waiting.remove(sequence)
            return
        self.running.remove(sequence)
        self.pool.release(sequence.pages)
        sequence.pages = []
        sequence.computed = 0

    def _register(self, sequence: Sequence, tokens: int) -> None:
        for page, digest in zip(sequence.pages, self._digests(sequence, tokens // PAGE_TOKENS), strict=False):
            self.pool.register(page, digest)

    def _digests(self, sequence: Sequence, count: int) -> list[bytes]:
        """Digests of the first `count` full pages; computed once for each page of a sequence."""
        known = sequence.digests
        while len(known) < count:
            start = len(known) * PAGE_TOKENS
            known.append(page_digest(known[-1] if known else b"", sequence.tokens[start : start + PAGE_TOKENS]))
        return known[:count]


def _batch(work: list[tuple[Sequence, int]]) -> Batch:
    tokens: list[int] = []
    spans = []
    for sequence, length in work:
        end = sequence.computed + length
        tokens += sequence.tokens[sequence.computed : end]
        pages = tuple(sequence.pages[: pages_for(end)])
        spans.append(Span(sequence.sequence_id, pages, sequence.computed, length, samples=end == len(sequence.tokens)))
    return Batch(np.asarray(tokens, np.int64), tuple(spans))
