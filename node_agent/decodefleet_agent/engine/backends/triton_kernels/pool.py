"""Keys and values into the pool: rotary positions, the Hadamard rotation, int8 with a scale per token and head."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from decodefleet_agent.engine.backends.triton_kernels import ROWS, Pool


@triton.jit(do_not_specialize=["rows", "slots"])
def _write(
    qkv, positions, row_slots, cosine, sine, rotation, queries, keys, values, key_scales, value_scales, rows, slots, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = DIM // 2
    ALL: tl.constexpr = HEADS + 2 * KV_HEADS
    item = tl.program_id(0) * ROWS + tl.arange(0, ROWS)  # a head of a row
    row, head = item // ALL, item % ALL
    here = row < rows
    dim, half = tl.arange(0, DIM), tl.arange(0, HALF)
    position = tl.load(positions + row, mask=here, other=0)
    turned = (here & (head < HEADS + KV_HEADS))[:, None]
    cos = tl.load(cosine + position[:, None] * HALF + half[None, :], mask=turned, other=1.0)
    sin = tl.load(sine + position[:, None] * HALF + half[None, :], mask=turned, other=0.0)
    low = tl.load(qkv + item[:, None] * DIM + half[None, :], mask=here[:, None], other=0.0)
    high = tl.load(qkv + item[:, None] * DIM + HALF + half[None, :], mask=here[:, None], other=0.0)
    upper = tl.load(rotation + half[:, None] * DIM + dim[None, :])
    lower = tl.load(rotation + (HALF + half)[:, None] * DIM + dim[None, :])
    rotated = tl.dot(low * cos - high * sin, upper, input_precision="ieee")
    rotated = tl.dot(high * cos + low * sin, lower, rotated, input_precision="ieee")

    is_query = here & (head < HEADS)
    tl.store(queries + (row * HEADS + head)[:, None] * DIM + dim[None, :], rotated * scale, mask=is_query[:, None])

    top = tl.max(tl.abs(rotated), axis=1)
    inverse = tl.where(top > 0, 127.0 / tl.where(top > 0, top, 1.0), 0.0)
    stored = tl.floor(rotated * inverse[:, None] + 0.5).to(tl.int8)
    slot = tl.load(row_slots + row, mask=here, other=0).to(tl.int64)
    is_key = here & (head >= HEADS) & (head < HEADS + KV_HEADS)
    is_value = here & (head >= HEADS + KV_HEADS)
    key_at = (head - HEADS) * slots.to(tl.int64) + slot
    value_at = (head - HEADS - KV_HEADS) * slots.to(tl.int64) + slot
    tl.store(keys + key_at[:, None] * DIM + dim[None, :], stored, mask=is_key[:, None])
    tl.store(values + value_at[:, None] * DIM + dim[None, :], stored, mask=is_value[:, None])
    tl.store(key_scales + key_at, top / 127.0, mask=is_key)
    tl.store(value_scales + value_at, top / 127.0, mask=is_value)


def write(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    tables: tuple[torch.Tensor, torch.Tensor],
    rotation: torch.Tensor,
    pool: Pool,
) -> torch.Tensor:
    """Stores the rows' keys and values, and returns their queries, rotated and divided by the root of head_dim.

    `qkv` [rows, (heads + 2 kv_heads) * head_dim] fp32; `positions`, `slots` [rows] int32; `tables`: cosine and sine
    [context, head_dim / 2]; `rotation` [head_dim, head_dim]. Returns [rows, heads, head_dim] fp32.
    """
    kv_heads, total, dim = pool.keys.shape
    rows, every = len(qkv), qkv.shape[1] // dim
    heads = every - 2 * kv_heads
    queries = torch.empty(rows, heads, dim, dtype=torch.float32, device=qkv.device)
    _write[(triton.cdiv(rows * every, ROWS),)](
        qkv, positions, slots, *tables, rotation, queries, pool.keys, pool.values, pool.key_scales, pool.value_scales,
        rows, total, dim**-0.5, heads, kv_heads, dim, ROWS, num_warps=4,
    )  # fmt: skip
    return queries
