"""Keys and values as the reference backend stores them: fp32, or rotated and then int8 or fp8 with a scale per token and head.

The rotation is orthogonal and its own inverse: a query that is rotated as the keys are meets them at the same angles, and a mix of
rotated values is rotated back. It spreads what is large in one dimension over all of them, so that one scale fits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from decodefleet_agent.engine.kv_pool import PAGE_TOKENS

ROTATED_TOGETHER = 64
_LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}  # that a stored number can be
DTYPES = {"fp32": torch.float32, "int8": torch.int8, "fp8": torch.float8_e4m3fn}


@dataclass(frozen=True)
class Stored:
    """Keys or values of one layer, or of all with the layers as the first dimension."""

    numbers: torch.Tensor  # [kv_heads, pages, 16, head_dim]
    scales: torch.Tensor | None  # [kv_heads, pages, 16] fp32, or None where numbers are fp32

    def layer(self, index: int) -> Stored:
        return Stored(self.numbers[index], None if self.scales is None else self.scales[index])


def token_bytes(kv_format: str, head_dim: int) -> int:
    """Of one token's keys, or its values, of one head."""
    dtype = DTYPES[kv_format]
    return head_dim * dtype.itemsize + (4 if dtype in _LARGEST else 0)


def allocated(kv_format: str, layers: int, kv_heads: int, pages: int, head_dim: int) -> Stored:
    """All zero, and touched."""
    shape, dtype = (layers, kv_heads, pages, PAGE_TOKENS), DTYPES[kv_format]
    numbers = torch.empty(*shape, head_dim, dtype=dtype).zero_()
    return Stored(numbers, torch.empty(shape).zero_() if dtype in _LARGEST else None)


def write(to: Stored, pages: torch.Tensor, slots: torch.Tensor, x: torch.Tensor) -> None:
    """`x`: [rows, kv_heads, head_dim], rotated as the format has it. What a token becomes depends on that token alone."""
    x = x.transpose(0, 1)
    if to.scales is None:
        to.numbers[:, pages, slots] = x
        return
    dtype = to.numbers.dtype
    largest = torch.tensor(_LARGEST[dtype])
    top = x.abs().amax(dim=-1)
    inverse = torch.div(largest, top)  # a plain number divided by a tensor is rounded twice
    inverse = torch.where(torch.isfinite(inverse), inverse, 0.0)  # all zero, or next to it
    scaled = (x * inverse[..., None]).clamp(-largest, largest)
    to.scales[:, pages, slots] = top / largest
    # Moved as bytes, which every version of PyTorch can.
    rounded = scaled.round().to(dtype) if dtype == torch.int8 else scaled.to(dtype).view(torch.int8)
    to.numbers.view(torch.int8)[:, pages, slots] = rounded


def read(stored: Stored, pages: torch.Tensor) -> torch.Tensor:
    """[kv_heads, pages, 16, head_dim] fp32, a copy."""
    if stored.scales is None:
        return stored.numbers.index_select(1, pages)
    numbers = stored.numbers.view(torch.int8).index_select(1, pages).view(stored.numbers.dtype)
    return numbers.float().mul_(stored.scales.index_select(1, pages)[..., None])


def rotated(x: torch.Tensor, kv_format: str) -> torch.Tensor:
    """As keys and values of the format are: the normalised Hadamard transform of each 64 of the last dimension, or of as large a power
    of two as divides it; fp32 as it is.

    Sums and differences of pairs, not a matrix product: its bits are those of the row alone.
    """
    if DTYPES[kv_format] not in _LARGEST:
        return x
    dim = x.shape[-1]
    width = min(ROTATED_TOGETHER, dim & -dim)
    step = 1
    while step < width:
        low, high = x.unflatten(-1, (-1, 2, step)).unbind(-2)
        x = torch.stack([low + high, low - high], dim=-2).flatten(-3)
        step *= 2
    return x * width**-0.5
