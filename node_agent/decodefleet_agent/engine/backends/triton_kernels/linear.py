"""A matrix product whose rows do not depend on each other: fixed tiles, inputs added in one order, in fp32."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from decodefleet_agent.engine.backends.triton_kernels import INTERPRETED, ROWS

# Outputs of a tile change no bit. The interpreter's time goes by the program, a GPU wants many.
_COLUMNS = 512 if INTERPRETED else 32
_DEPTH = 128


@triton.jit(do_not_specialize=["rows"])
def _linear(
    x, weight, bias, out, rows,
    INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
    here, wanted = (row < rows)[:, None], (column < OUTPUTS)[None, :]
    result = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, INPUTS, DEPTH):
        depth = start + tl.arange(0, DEPTH)
        inside = depth < INPUTS
        a = tl.load(x + row[:, None] * INPUTS + depth[None, :], mask=here & inside[None, :], other=0.0)
        b = tl.load(weight + column[None, :] * INPUTS + depth[:, None], mask=wanted & inside[:, None], other=0.0)
        result = tl.dot(a, b, result, input_precision=PRECISION)
    if BIAS:
        result += tl.load(bias + column, mask=column < OUTPUTS, other=0.0)[None, :]
    at = out + row[:, None] * OUTPUTS + column[None, :]
    if ADD:
        result += tl.load(at, mask=here & wanted, other=0.0)
    tl.store(at, result, mask=here & wanted)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, out: torch.Tensor | None = None) -> torch.Tensor:
    """[rows, inputs] times [outputs, inputs] to [rows, outputs] fp32; added to `out` where that is given."""
    rows, inputs = x.shape
    outputs = len(weight)
    result = torch.empty(rows, outputs, dtype=torch.float32, device=x.device) if out is None else out
    depth = min(_DEPTH, max(16, triton.next_power_of_2(inputs)))
    _linear[(triton.cdiv(rows, ROWS), triton.cdiv(outputs, _COLUMNS))](
        x, weight, weight if bias is None else bias, result, rows, inputs, outputs, bias is not None, out is not None,
        "ieee", ROWS, _COLUMNS, depth, num_warps=4, num_stages=4,
    )  # fmt: skip
    return result
