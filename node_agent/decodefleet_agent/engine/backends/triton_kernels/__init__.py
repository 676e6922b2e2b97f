"""The cuda backend's kernels, one file each, with a plain function that launches each.

A kernel's tile is the same whatever the number of rows, and it walks a sum in one fixed order: what a row gives does not depend
on the rows beside it. Numbers of rows are never specialised on, so that one compiled program serves them all.
With TRITON_INTERPRET=1, set before Triton is first imported, they run on CPU tensors. Importing this package alone needs no Triton.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
ROWS = 16  # of a tile: the fewest that tensor cores take
PARTITION = 256  # tokens whose attention is one partial result


@dataclass(frozen=True)
class Pool:
    """One layer's keys and values; slot = page * 16 + token in the page."""

    keys: torch.Tensor  # [kv_heads, slots, head_dim] int8
    values: torch.Tensor
    key_scales: torch.Tensor  # [kv_heads, slots] fp32
    value_scales: torch.Tensor


@dataclass(frozen=True)
class Tiles:
    """Query tokens of one sequence that are attended to together. All [tiles] int32."""

    row: torch.Tensor  # of its first token in the batch
    tokens: torch.Tensor
    position: torch.Tensor  # of its first token
    span: torch.Tensor  # whose line of the page table it reads

    def part(self, start: int, end: int) -> Tiles:
        return Tiles(self.row[start:end], self.tokens[start:end], self.position[start:end], self.span[start:end])


def tile_rows(group: int) -> int:
    """Rows of a tile of attention where so many query heads share a key-value head."""
    return max(ROWS, 1 << (group - 1).bit_length())
