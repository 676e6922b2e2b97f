"""Continuous batching: which tokens of which sequences the next step computes, and who gives way when pages run out."""

from __future__ import annotations

import bisect
import time

import numpy as np

from decodefleet_agent.engine.batch import Batch, Span
from decodefleet_agent.engine.chunks import cut
from decodefleet_agent.engine.controllers.base import Decision, Limits, Situation
from decodefleet_agent.engine.kv_pool import GIVEN_BACK, PAGE_TOKENS, KVPool, page_digest, pages_for
from decodefleet_agent.engine.sequence import Sequence
from decodefleet_agent.engine.step_cost import StepCost, Work
from decodefleet_agent.messages import Targets

_NO_LIMIT = 1 << 62


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

    def situation(self, targets: Targets, cost: StepCost | None) -> Situation:
        """What a controller decides upon."""
        decoding = [sequence for sequence in self.running if sequence.remaining == 1]
        prompt = next((s for s in self.running if s.remaining > 1), None) or next(iter(self.waiting), None)
        return Situation(
            self.limits,
            running=len(self.running),
            waiting=len(self.waiting),
            work=Work(len(decoding), sum(len(sequence.tokens) for sequence in decoding)),
            prompt_start=prompt.computed if prompt else 0,
            prompt_remaining=prompt.remaining if prompt else 0,
            prompt_waited=time.monotonic() - prompt.submitted_at if prompt else 0.0,
            targets=targets,
            cost=cost,
        )

    def schedule(self, decision: Decision, prefill_first: bool) -> Batch:
        """The next step's batch; empty where nothing can run. May preempt, by recomputation."""
        preempted = self._grow()
        budget = self.limits.max_batch_tokens
        decodes = [(sequence, 1) for sequence in self.running if sequence.remaining == 1]
        if not prefill_first:
            decodes = decodes[:budget]
            budget -= len(decodes)
        prefills = self._prefill(budget, decision, admit=not preempted)
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
        before = sequence.computed // PAGE_TOKENS
        sequence.computed += length
        if (prompt := min(sequence.computed, sequence.prompt_length)) // PAGE_TOKENS > before:
            self._register(sequence, prompt)
        if self.limits.window:
            self._give_back(sequence, self.limits.window.unseen(sequence.computed))

    def check_integrity(self) -> None:
        """Raises RuntimeError unless pool and sequences agree."""
        self.pool.check_integrity([s.held for s in self.running])
        if any(s.pages or s.computed for s in self.waiting):
            raise RuntimeError("a waiting sequence holds pages")
        if len(self.running) > self.limits.max_batch:
            raise RuntimeError(f"{len(self.running)} sequences run, and at most {self.limits.max_batch} may")
        if any(pages_for(s.computed) > len(s.pages) for s in self.running):
            raise RuntimeError("a sequence has more computed tokens than pages")
        window = self.limits.window
        if window and any(s.pages[page] != GIVEN_BACK for s in self.running for page in window.unseen(s.computed)):
            raise RuntimeError("a sequence holds a page outside its window")

    def _grow(self) -> bool:
        """Gives each sequence the page its next token needs. The last in order gives way; True if one had to."""
        before = self.preemptions
        for sequence in list(self.running):
            while (missing := pages_for(self._next(sequence)) - len(sequence.pages)) > 0 and sequence in self.running:
                pages = self.pool.allocate(missing)
                if pages is None:
                    self._preempt(self.running[-1])
                else:
                    sequence.pages += pages
        return self.preemptions > before

    def _prefill(self, budget: int, decision: Decision, admit: bool) -> list[tuple[Sequence, int]]:
        """Chunks of prompts in order, as many as fit into the decision's room, and the first whether it does or not."""
        work: list[tuple[Sequence, int]] = []
        # Where the controller sets no limit the budget alone cuts, also short prompts, so that no step goes out half empty.
        room = decision.prefill_tokens if decision.prefill_tokens < self.limits.max_batch_tokens else _NO_LIMIT
        candidates = [sequence for sequence in self.running if sequence.remaining > 1]
        while budget:
            if candidates:
                sequence = candidates.pop(0)
                length = min(self._cut(sequence, sequence.remaining, room, first=not work), budget)
            elif admit and self.waiting and len(self.running) < decision.max_running:
                sequence = self.waiting[0]
                length = min(self._admit(sequence, room, first=not work), budget)
            else:
                break
            if not length:
                break
            length = self._extend(sequence, length)
            work.append((sequence, length))
            budget -= length
            room -= length
        return work

    def _cut(self, sequence: Sequence, remaining: int, room: int, first: bool) -> int:
        """Tokens of the prompt that this step takes; 0 where they do not fit."""
        limits = self.limits
        length = cut(limits.chunk, len(sequence.tokens), remaining, room, limits.cores, limits.whole_below)
        return length if first or length <= room else 0

    def _admit(self, sequence: Sequence, room: int, first: bool) -> int:
        """Moves a waiting sequence to the running ones, and says how much of it this step takes.

        0, and it waits on, where the step has no room for it, or the pool none beside the growth of those that run.
        """
        self._reuse(sequence)
        missing = pages_for(self._next(sequence)) - len(sequence.pages)
        reserve = sum(map(self._growth, [*self.running, sequence])) if self.running else 0
        length = self._cut(sequence, sequence.remaining, room, first)
        if not length or self.pool.available < missing + reserve:
            self._let_go(sequence)
            return 0
        new = self.pool.allocate(missing)
        assert new is not None
        sequence.pages += new
        if sequence.scheduled_at is None:
            sequence.scheduled_at = time.monotonic()
            sequence.cached_prompt_tokens = sequence.counted_prompt = min(sequence.computed, sequence.prompt_length)
        self.waiting.remove(sequence)
        bisect.insort(self.running, sequence, key=lambda s: s.order)
        return length

    def _growth(self, sequence: Sequence) -> int:
        """Pages that its next tokens need beyond those of the present ones; at most `reserve_tokens` are looked ahead.

        With a window: beyond those that it holds and the one of its next token, until it holds as many as a row sees.
        """
        length = len(sequence.tokens)
        ahead = pages_for(length + min(sequence.output_left, self.limits.reserve_tokens))
        if (window := self.limits.window) is None:
            return ahead - pages_for(length)
        to_come = max(0, pages_for(self._next(sequence)) - len(sequence.pages))
        return max(0, min(ahead, window.pages) - len(sequence.held) - to_come)

    def _next(self, sequence: Sequence) -> int:
        """Tokens that it needs pages for before a step: all, or with a window one more, as later ones come with the chunks."""
        return len(sequence.tokens) if self.limits.window is None else sequence.computed + 1

    def _extend(self, sequence: Sequence, length: int) -> int:
        """Takes pages for a chunk, from those that no running sequence will need; how much of the chunk they hold."""
        missing = pages_for(sequence.computed + length) - len(sequence.pages)
        if missing > 0:
            reserved = sum(self._growth(other) for other in self.running if other is not sequence)
            sequence.pages += self.pool.allocate(max(0, min(missing, self.pool.available - reserved))) or []
        return min(length, len(sequence.pages) * PAGE_TOKENS - sequence.computed)

    def _reuse(self, sequence: Sequence) -> None:
        """Takes what the prefix cache has of it: the longest beginning of which all pages are known that later rows see."""
        digests = self._digests(sequence, (len(sequence.tokens) - 1) // PAGE_TOKENS)
        window = self.limits.window
        unknown = [index for index, digest in enumerate(digests) if not self.pool.known(digest)]
        count = unknown[0] if unknown else len(digests)
        if window and unknown and count >= window.unseen(0).start:
            # Pages that only earlier rows saw may be unknown.
            ends = range(len(digests), count, -1)
            count = next((end for end in ends if unknown[bisect.bisect_left(unknown, end) - 1] in window.unseen(end * PAGE_TOKENS)), count)
        unseen = window.unseen(count * PAGE_TOKENS) if window else range(0)
        taken = iter(self.pool.match(digests[index] for index in range(count) if index not in unseen))
        sequence.pages = [GIVEN_BACK if index in unseen else next(taken) for index in range(count)]
        sequence.computed = count * PAGE_TOKENS

    def _give_back(self, sequence: Sequence, indices: range) -> None:
        left = [index for index in indices if sequence.pages[index] != GIVEN_BACK]
        self.pool.release([sequence.pages[index] for index in left])
        for index in left:
            sequence.pages[index] = GIVEN_BACK

    def _let_go(self, sequence: Sequence) -> None:
        self.pool.release(sequence.held)
        sequence.pages = []
        sequence.computed = 0

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
        self._let_go(sequence)

    def _register(self, sequence: Sequence, tokens: int) -> None:
        for page, digest in zip(sequence.pages, self._digests(sequence, tokens // PAGE_TOKENS), strict=False):
            if page != GIVEN_BACK:
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
