"""Attention over the pool: fixed partitions of 256 tokens, each by its own program, and their combination in order."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from decodefleet_agent.engine.backends.triton_kernels import INTERPRETED, PARTITION, Pool, Tiles, tile_rows

_KEYS = 64  # read at once; a row's sums go by it, so it is the same everywhere
_PARTIALS = 64 << 20  # fp32 values of partial results computed at once, at most


@triton.jit(do_not_specialize=["slots", "width", "partitions"])
def _partials(
    queries, keys, values, key_scales, value_scales, tile_row, tile_tokens, tile_position, tile_span, page_table,
    parts, tops, totals, slots, width, partitions,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr, PARTITION: tl.constexpr, KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    tile, head, partition = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    tokens, first = tl.load(tile_tokens + tile), tl.load(tile_position + tile)
    last = first + tokens - 1
    if partition * PARTITION <= last:
        line, dim = tl.arange(0, ROWS), tl.arange(0, DIM)
        token = line // GROUP
        here = token < tokens
        query = ((tl.load(tile_row + tile) + token) * KV_HEADS + head) * GROUP + line % GROUP
        q = tl.load(queries + query[:, None] * DIM + dim[None, :], mask=here[:, None], other=0.0)
        table = page_table + tl.load(tile_span + tile) * width
        top = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        part = tl.zeros([ROWS, DIM], tl.float32)
        for block in range(0, PARTITION, KEYS):
            key = partition * PARTITION + block + tl.arange(0, KEYS)
            # What lies beyond the tile's last token was left by others and may be anything.
            stored = key <= last
            page = tl.load(table + key // 16, mask=stored, other=0).to(tl.int64)
            at = head * slots.to(tl.int64) + page * 16 + key % 16
            k = tl.load(keys + at[None, :] * DIM + dim[:, None], mask=stored[None, :], other=0).to(tl.float32)
            scores = tl.dot(q, k, input_precision=PRECISION) * tl.load(key_scales + at, mask=stored, other=0.0)[None, :]
            seen = here[:, None] & (key[None, :] <= (first + token)[:, None])
            scores = tl.where(seen, scores, float("-inf"))
            new = tl.maximum(top, tl.max(scores, axis=1))
            finite = tl.where(new == float("-inf"), 0.0, new)  # rows that see no key get weights of 0, not NaN
            factor = tl.exp(top - finite)
            weights = tl.exp(scores - finite[:, None])
            total = total * factor + tl.sum(weights, axis=1)
            v = tl.load(values + at[:, None] * DIM + dim[None, :], mask=stored[:, None], other=0).to(tl.float32)
            scaled = weights * tl.load(value_scales + at, mask=stored, other=0.0)[None, :]
            part = tl.dot(scaled, v, part * factor[:, None], input_precision=PRECISION)
            top = new
        to = ((tile.to(tl.int64) * KV_HEADS + head) * partitions + partition) * ROWS + line
        tl.store(parts + to[:, None] * DIM + dim[None, :], part)
        tl.store(tops + to, top)
        tl.store(totals + to, total)


@triton.jit(do_not_specialize=["partitions"])
def _combine(
    parts, tops, totals, tile_row, tile_tokens, tile_position, rotation, out, partitions,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr, PARTITION: tl.constexpr,
):  # fmt: skip
    tile, head = tl.program_id(0), tl.program_id(1)
    tokens = tl.load(tile_tokens + tile)
    count = (tl.load(tile_position + tile) + tokens - 1) // PARTITION + 1
    line, dim = tl.arange(0, ROWS), tl.arange(0, DIM)
    start = (tile.to(tl.int64) * KV_HEADS + head) * partitions * ROWS + line
    top = tl.full([ROWS], float("-inf"), tl.float32)
    for partition in range(0, count):
        top = tl.maximum(top, tl.load(tops + start + partition * ROWS))
    top = tl.where(top == float("-inf"), 0.0, top)
    total = tl.zeros([ROWS], tl.float32)
    result = tl.zeros([ROWS, DIM], tl.float32)
    for partition in range(0, count):
        at = start + partition * ROWS
        factor = tl.exp(tl.load(tops + at) - top)
        total += factor * tl.load(totals + at)
        result += factor[:, None] * tl.load(parts + at[:, None] * DIM + dim[None, :])
    here = line // GROUP < tokens
    result = result / tl.where(here, total, 1.0)[:, None]
    turned = tl.load(rotation + dim[:, None] * DIM + dim[None, :])
    result = tl.dot(result, turned, input_precision="ieee")
    query = ((tl.load(tile_row + tile) + line // GROUP) * KV_HEADS + head) * GROUP + line % GROUP
    tl.store(out + query[:, None] * DIM + dim[None, :], result, mask=here[:, None])


def attend(
    queries: torch.Tensor, pool: Pool, tiles: Tiles, page_table: torch.Tensor, partitions: int, rotation: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """[rows, heads, head_dim] rotated queries to [rows, heads * head_dim], rotated back. Every row must be in a tile.

    `page_table` [spans, pages] int32; `partitions`: at least those of the longest sequence. `dtype` fp32 has exact products;
    another takes them from tensor cores (tf32).
    """
    rows, heads, dim = queries.shape
    kv_heads, slots, _ = pool.keys.shape
    group = heads // kv_heads
    height = tile_rows(group)
    out = torch.empty(rows, heads * dim, dtype=dtype, device=queries.device)
    # A multiple of 32 tiles, so that a part's addresses are as aligned as the whole's.
    at_once = max(32, _PARTIALS // (kv_heads * partitions * height * dim) // 32 * 32)
    precision = "ieee" if INTERPRETED or dtype == torch.float32 else "tf32"
    for start in range(0, len(tiles.row), at_once):
        some = tiles.part(start, start + at_once)
        count = len(some.row)
        parts = torch.empty(count, kv_heads, partitions, height, dim, dtype=torch.float32, device=out.device)
        tops, totals = (torch.empty(parts.shape[:-1], dtype=torch.float32, device=out.device) for _ in range(2))
        _partials[(count, kv_heads, partitions)](
            queries, pool.keys, pool.values, pool.key_scales, pool.value_scales, some.row, some.tokens, some.position, some.span,
            page_table, parts, tops, totals, slots, page_table.shape[1], partitions,
            kv_heads, group, dim, height, PARTITION, _KEYS, precision, num_warps=4, num_stages=2,
        )  # fmt: skip
        _combine[(count, kv_heads)](
            parts, tops, totals, some.row, some.tokens, some.position, rotation, out, partitions,
            kv_heads, group, dim, height, PARTITION, num_warps=4,
        )  # fmt: skip
    return out
