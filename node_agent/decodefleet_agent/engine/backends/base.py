"""What the engine asks of a backend: take the weights once, then compute one batch per step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from decodefleet_agent.engine.batch import Batch
from decodefleet_agent.engine.sampling import Draw
from decodefleet_agent.engine.weights import ModelConfig, Weights


class Backend(Protocol):
    """Owns the weights in its own layout and the memory of the KV pool."""

    name: str
    revision: int  # rises whenever a change gives other bits
    kv_format: str  # of keys and values in the pool
    instructions: str  # the processor's instruction sets that it uses
    numerics: str  # what else its bits depend on

    @property
    def device_memory(self) -> int | None:
        """Bytes that are free for the KV pool where that is not the host's memory, else None."""
        ...

    def page_bytes(self, config: ModelConfig) -> int:
        """Bytes of one page of 16 tokens, keys and values of all layers."""
        ...

    def prepare(self, weights: Weights, context_length: int, progress: Progress) -> None:
        """Takes the weights. Raises ModelError."""
        ...

    def allocate(self, pages: int) -> None:
        """Allocates the KV pool, once, and touches all of it."""
        ...

    def step(self, batch: Batch) -> np.ndarray:
        """Writes keys and values of all rows to the pool, and returns logits: [spans that sample, vocabulary] fp32, in the spans' order.

        They are valid until the next step. A row's bits depend on the sequence's tokens up to it, and on nothing else that is in the
        batch or was computed before.
        """
        ...

    def sample(self, logits: np.ndarray, draws: Sequence[Draw]) -> list[int | str]:
        """The token of each row of what `step` returned, or why there is none. `sampling.sample_rows`, or the same natively."""
        ...


class Progress(Protocol):
    """Called with a share in [0, 1] and a few words."""

    def __call__(self, done: float, text: str) -> None: ...
