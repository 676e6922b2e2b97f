"""One step's work as a flattened ragged batch: rows of tokens, each span of them belonging to one sequence."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Span:
    """Consecutive tokens of one sequence that a step computes.

    `pages` hold keys and values of positions 0 … start + length - 1, 16 to a page; those before `start` are there already.
    GIVEN_BACK (-1) stands for a page of which no row sees a token.
    `samples`: the last row's logits are wanted.
    """

    sequence_id: int
    pages: tuple[int, ...]
    start: int
    length: int
    samples: bool


@dataclass(frozen=True)
class Batch:
    """`token_ids` of all spans, one after the other: [rows] int64."""

    token_ids: np.ndarray
    spans: tuple[Span, ...]

    @property
    def rows(self) -> int:
        return len(self.token_ids)
