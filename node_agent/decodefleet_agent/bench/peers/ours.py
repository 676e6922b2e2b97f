"""decodefleet's own engine: what an agent starts, stepped without the server process."""

from __future__ import annotations

import math
import os
import time
from importlib.metadata import version
from typing import Protocol, runtime_checkable

os.environ.setdefault("GOMP_SPINCOUNT", "3000")  # as the engine's own process has it

import numpy as np

from decodefleet.config import AgentConfig, Batching, Engine
from decodefleet_agent.bench.protocol import Load, Loaded, Timing
from decodefleet_agent.engine.batch import Batch, Span
from decodefleet_agent.engine.kv_pool import PAGE_TOKENS, pages_for
from decodefleet_agent.engine.startup import start
from decodefleet_agent.messages import Sampling, Submit

_FLOOR_STEPS = 20


@runtime_checkable
class MatrixLoop(Protocol):
    """What a backend may offer beside its steps: the matrix products of a decoding step and nothing else, as the floor of its time."""

    def products(self, rows: int) -> None:
        """Runs the products of one step of so many sampling rows."""
        ...


class Decodefleet:
    """See `Peer`."""

    def load(self, load: Load) -> Loaded:
        pages = load.batch * pages_for(load.context)
        config = AgentConfig(
            model_uri=load.uri,
            cpu=load.threads,
            # Prompts first, so that the whole batch decodes together, as the other engines' does.
            engine=Engine(batching=Batching(max_batch=load.batch, batch_size_threshold=1), max_context=max(PAGE_TOKENS, load.context)),
        )
        self._engine, ready = start(config, lambda progress: None, time.monotonic())
        self._pages, self._sequences = ready.model.kv_pages, 0
        if self._pages < pages:
            raise ValueError(f"{load.batch} sequences of {load.context} tokens need {pages} pages, and this memory holds {self._pages}")
        backend = self._engine.backend
        return Loaded(version("decodefleet"), ready.model.weights_format, f"{backend.name} backend")

    def generate(self, prompts: list[list[int]], new_tokens: int) -> Timing:
        engine = self._engine
        ids = range(self._sequences, self._sequences + len(prompts))
        self._sequences += len(prompts)
        waiting, counts = set(ids), dict.fromkeys(ids, 0)
        sampling = Sampling(seed=0, max_tokens=new_tokens)
        begun = time.perf_counter()
        first, before = 0.0, 0
        outputs = engine.handle(Submit(number, prompt, sampling) for number, prompt in zip(ids, prompts, strict=True))
        while engine.busy:
            outputs += engine.step().outputs
            for output in outputs:
                counts[output.sequence_id] += len(output.token_ids)
                if output.error:
                    raise RuntimeError(output.error)
                waiting.discard(output.sequence_id)
            if not first and not waiting:
                first, before = time.perf_counter() - begun, sum(counts.values())
            outputs = []
        total = time.perf_counter() - begun
        if set(counts.values()) != {new_tokens}:
            raise RuntimeError(f"{new_tokens} tokens were asked for, and the sequences have {sorted(set(counts.values()))}")
        return Timing(first, total, sum(counts.values()) - before)

    def logprobs(self, windows: list[list[int]]) -> list[list[float]]:
        """As decoding has them: a token per window and step, keys and values read from the pool."""
        each = pages_for(max(map(len, windows)))
        together = self._pages // each
        result: list[list[float]] = []
        for start_ in range(0, len(windows), together):
            result += self._scored(windows[start_ : start_ + together], each)
        return result

    def floor(self, rows: int) -> float | None:
        backend = self._engine.backend
        if not isinstance(backend, MatrixLoop):
            return None
        backend.products(rows)  # not measured: the first time touches memory
        begun = time.perf_counter()
        for _ in range(_FLOOR_STEPS):
            backend.products(rows)
        return (time.perf_counter() - begun) / _FLOOR_STEPS

    def _scored(self, windows: list[list[int]], each: int) -> list[list[float]]:
        """Nobody holds the pool's pages between generations: the scheduler and its prefix cache never see these."""
        result: list[list[float]] = [[] for _ in windows]
        for position in range(max(map(len, windows)) - 1):
            numbers = [number for number, window in enumerate(windows) if position + 1 < len(window)]
            spans = tuple(
                Span(number, tuple(range(number * each, number * each + position // PAGE_TOKENS + 1)), position, 1, samples=True)
                for number in numbers
            )
            logits = self._engine.backend.step(Batch(np.array([windows[number][position] for number in numbers], np.int64), spans))
            for number, row in zip(numbers, logits, strict=True):
                highest = float(row.max())
                total = math.log(float(np.exp(row - highest).sum(dtype=np.float64))) + highest
                result[number].append(float(row[windows[number][position + 1]]) - total)
        return result


def create() -> Decodefleet:
    return Decodefleet()
