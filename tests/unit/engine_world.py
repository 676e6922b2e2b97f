"""The engine over a backend that remembers tokens instead of computing: every stream must come out as if it were alone.

The backend keeps each token in its pool slot and derives the next token from all that it reads back through the pages. A
wrong page, a lost or repeated token, or a stale prefix therefore changes the stream.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import numpy as np

from decodefleet_agent.engine.batch import Batch
from decodefleet_agent.engine.controllers import CONTROLLERS
from decodefleet_agent.engine.controllers.base import Controller, Limits
from decodefleet_agent.engine.engine import Engine
from decodefleet_agent.engine.kv_pool import PAGE_TOKENS, KVPool
from decodefleet_agent.engine.sampling import sample_rows
from decodefleet_agent.engine.sparsity import Window, pool_context
from decodefleet_agent.messages import Cancel, Output, Sampling, Submit, Targets

VOCABULARY = 50
LIMITS = Limits(max_batch=4, max_batch_tokens=64, chunk=None, batch_size_threshold=8)


def seen(tokens: list[int], window: Window | None) -> list[int]:
    """Those that the last one attends to."""
    first = max(0, len(tokens) - window.tokens) if window else 0
    return [token for position, token in enumerate(tokens) if position >= first or (window and position < window.sinks)]


def next_token(tokens: list[int]) -> int:
    return int.from_bytes(hashlib.blake2b(np.asarray(tokens, np.int64).tobytes(), digest_size=4).digest(), "big") % VOCABULARY


class RememberingBackend:
    name = "remembering"
    revision = 1
    sample = staticmethod(sample_rows)

    def __init__(self, pages: int, window: Window | None = None) -> None:
        self.window = window
        self.memory = np.full((pages, PAGE_TOKENS), -1)
        self.batches: list[Batch] = []

    def step(self, batch: Batch) -> np.ndarray:
        self.batches.append(batch)
        logits, row = [], 0
        for span in batch.spans:
            for position in range(span.start, span.start + span.length):
                self.memory[span.pages[position // PAGE_TOKENS], position % PAGE_TOKENS] = batch.token_ids[row]
                row += 1
            if span.samples:
                stored = self.memory[list(span.pages)].reshape(-1)[: span.start + span.length]
                logits.append(np.zeros(VOCABULARY, np.float32))
                logits[-1][next_token(seen(stored.tolist(), self.window))] = 1
        return np.asarray(logits).reshape(-1, VOCABULARY)


@dataclass
class Streams:
    """An engine under test, and what came out of it."""

    engine: Engine
    backend: RememberingBackend
    outputs: dict[int, list[Output]] = field(default_factory=dict)

    def handle(self, *commands: Submit | Cancel | Targets) -> None:
        self._take(self.engine.handle(commands))

    def step(self) -> None:
        before = self.engine.stats()
        result = self.engine.step()
        self.engine.check_integrity()
        assert result.stats.batch_tokens, "a step with work computed nothing"
        assert result.stats.steps == before.steps + 1
        limits = self.engine.scheduler.limits
        assert result.stats.batch_tokens <= limits.max_batch_tokens and result.stats.running <= limits.max_batch
        self._take(result.outputs)

    def finish(self) -> None:
        for _ in range(10_000):
            if not self.engine.busy:
                return
            self.step()
        raise AssertionError("the engine does not finish")

    def tokens(self, sequence_id: int) -> list[int]:
        return [token for output in self.outputs[sequence_id] for token in output.token_ids]

    def _take(self, outputs: list[Output]) -> None:
        for output in outputs:
            self.outputs.setdefault(output.sequence_id, []).append(output)


def start(limits: Limits = LIMITS, pages: int = 64, context: int = 400, controller: Controller = CONTROLLERS["Static"]) -> Streams:
    backend = RememberingBackend(pages, limits.window)
    context = pool_context(context, pages, limits.window)
    return Streams(Engine(backend, limits, KVPool(pages), 1, context, VOCABULARY, controller), backend)  # type: ignore[arg-type]

def submit(sequence_id: int, prompt: list[int], max_tokens: int = 8, **fields: object) -> Submit:
    return Submit(sequence_id, prompt, Sampling(seed=1, max_tokens=max_tokens), **fields)  # type: ignore[arg-type]


def alone(prompt: list[int], max_tokens: int, context: int, window: Window | None = None) -> list[int]:
    tokens = list(prompt)
    while len(tokens) < context and len(tokens) - len(prompt) < max_tokens:
        tokens.append(next_token(seen(tokens, window)))
    return tokens[len(prompt) :]
