"""What lies between the matrix products: RMSNorm, a sum along each row, and SwiGLU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 1024


@triton.jit
def _rms_norm(x, weight, index, out, epsilon, SIZE: tl.constexpr, BLOCK: tl.constexpr, PICK: tl.constexpr):
    row = tl.program_id(0)
    source = row
    if PICK:
        source = tl.load(index + row)
    at = tl.arange(0, BLOCK)
    inside = at < SIZE
    values = tl.load(x + source * SIZE + at, mask=inside, other=0.0)
    scale = 1.0 / tl.sqrt(tl.sum(values * values, axis=0) / SIZE + epsilon)
    tl.store(out + row * SIZE + at, values * scale * tl.load(weight + at, mask=inside, other=0.0), mask=inside)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, epsilon: float, dtype: torch.dtype, index: torch.Tensor | None = None
) -> torch.Tensor:
    """[rows, size] fp32 to `dtype`; of the rows of `index` [picked] int32 only, where that is given."""
    size = x.shape[1]
    rows = len(x) if index is None else len(index)
    out = torch.empty(rows, size, dtype=dtype, device=x.device)
    if rows:
        block = triton.next_power_of_2(size)
        _rms_norm[(rows,)](x, weight, out if index is None else index, out, epsilon, size, block, index is not None, num_warps=4)
    return out


@triton.jit
def _swiglu(gate_up, out, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < SIZE
    gate = tl.load(gate_up + row * 2 * SIZE + at, mask=inside, other=0.0)
    up = tl.load(gate_up + row * 2 * SIZE + SIZE + at, mask=inside, other=0.0)
    tl.store(out + row * SIZE + at, gate / (1.0 + tl.exp(-gate)) * up, mask=inside)


def swiglu(gate_up: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[rows, 2 * size] fp32, gates before what they gate, to [rows, size]."""
    rows, size = len(gate_up), gate_up.shape[1] // 2
    out = torch.empty(rows, size, dtype=dtype, device=gate_up.device)
    _swiglu[(rows, triton.cdiv(size, _BLOCK))](gate_up, out, size, _BLOCK, num_warps=4)
    return out
