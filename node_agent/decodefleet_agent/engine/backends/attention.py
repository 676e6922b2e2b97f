"""Attention of the reference backend: query tiles of one sequence against fixed partitions of its keys, combined in order.

An item is one tile against one partition; its matrix products have the same shapes in every batch. A partition that a query
row does not see adds exactly nothing to it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from decodefleet_agent.engine.backends.kv_formats import Stored, read
from decodefleet_agent.engine.batch import Batch, Span
from decodefleet_agent.engine.kv_pool import PAGE_TOKENS
from decodefleet_agent.engine.sparsity import Window

PARTITION = 64
_PAGES = PARTITION // PAGE_TOKENS
_ITEM_ROWS = 16384  # query rows times partitions computed at once: bounds the memory of scores and gathered keys


@dataclass(frozen=True)
class _Group:
    """Query tiles of one size that are computed together."""

    rows: torch.Tensor  # [tiles, tokens] row in the batch; 0 where the tile has no token
    valid: torch.Tensor  # [tiles, tokens]
    item_tile: torch.Tensor  # [items]
    item_order: torch.Tensor  # [items] which of its tile's items it is
    item_pages: torch.Tensor  # [items * 4] page numbers; 0 beyond the sequence, and where a page was given back
    partial_items: torch.Tensor  # items whose partition is not all there
    stale: torch.Tensor  # [partial items, 64] positions that hold nothing of the sequence
    hidden: torch.Tensor  # [items, tile rows, 64] keys that a query row does not see
    partitions: int  # of a tile, at most


@dataclass(frozen=True)
class AttentionPlan:
    """What all layers of a step share."""

    positions: torch.Tensor  # [rows]
    pages: torch.Tensor  # [rows] where each row's key and value go
    slots: torch.Tensor  # [rows]
    sampled_rows: torch.Tensor
    groups: list[_Group]


@dataclass(frozen=True)
class _Tile:
    rows: range
    positions: range
    pages: tuple[int, ...]
    end: int  # tokens of the sequence in the pool after this step
    partitions: tuple[int, ...]  # those that any of its rows sees


def plan_attention(
    batch: Batch, heads_per_kv_head: int, tile_rows: tuple[int, ...], window: Window | None = None
) -> AttentionPlan:
    """`tile_rows`: query rows of a tile, from the smallest, all giving the same bits. A longer one is taken for spans that fill it."""
    positions: list[int] = []
    pages: list[int] = []
    tiles: dict[int, list[_Tile]] = {}
    sizes = [max(1, rows // heads_per_kv_head) for rows in tile_rows]
    ends = np.cumsum([span.length for span in batch.spans])
    sampled = torch.from_numpy(ends[[span.samples for span in batch.spans]] - 1)
    for span in _joined(batch.spans):
        first, end = len(positions), span.start + span.length
        positions += range(span.start, end)
        pages += [span.pages[position // PAGE_TOKENS] for position in range(span.start, end)]
        tokens = next((size for size in reversed(sizes) if size <= span.length), sizes[0])
        for start in range(0, span.length, tokens):
            where = range(start, min(start + tokens, span.length))
            at = range(span.start + where.start, span.start + where.stop)
            rows = range(first + where.start, first + where.stop)
            tiles.setdefault(tokens, []).append(_Tile(rows, at, span.pages, end, _seen(at, window)))
    at_positions = torch.tensor(positions, dtype=torch.long)
    groups = [
        _group(part, tokens, heads_per_kv_head, tile_rows[0], window)
        for tokens, same in tiles.items()
        for part in _split(same, tokens * heads_per_kv_head)
    ]
    return AttentionPlan(at_positions, torch.tensor(pages), at_positions % PAGE_TOKENS, sampled, groups)


def _joined(spans: tuple[Span, ...]) -> list[Span]:
    """Spans that go on where the one before ends, in the same pages, as one: fuller tiles where many rows of a sequence are sampled."""
    result: list[Span] = []
    for span in spans:
        before = result[-1] if result else None
        if before and (span.sequence_id, span.start, span.pages) == (before.sequence_id, before.start + before.length, before.pages):
            result[-1] = replace(before, length=before.length + span.length)
        else:
            result.append(span)
    return result


def _seen(positions: range, window: Window | None) -> tuple[int, ...]:
    """Partitions of which any of the positions sees a token."""
    partitions = range(positions[-1] // PARTITION + 1)
    if window is None:
        return tuple(partitions)
    first = positions[0] - window.tokens + 1
    return tuple(number for number in partitions if number * PARTITION < window.sinks or (number + 1) * PARTITION > first)


def _split(tiles: list[_Tile], rows: int) -> list[list[_Tile]]:
    parts: list[list[_Tile]] = []
    size = _ITEM_ROWS
    for tile in tiles:
        if size + len(tile.partitions) * rows > _ITEM_ROWS:
            parts.append([])
            size = 0
        parts[-1].append(tile)
        size += len(tile.partitions) * rows
    return parts


def _group(tiles: list[_Tile], tokens: int, heads_per_kv_head: int, multiple: int, window: Window | None) -> _Group:
    padded = -(-tokens * heads_per_kv_head // multiple) * multiple
    rows = np.zeros((len(tiles), tokens), np.int64)
    positions = np.full((len(tiles), tokens), -1)
    for index, tile in enumerate(tiles):
        rows[index, : len(tile.rows)] = tile.rows
        positions[index, : len(tile.rows)] = tile.positions
    counts = [len(tile.partitions) for tile in tiles]
    item_tile = np.repeat(np.arange(len(tiles)), counts)
    item_partition = np.concatenate([tile.partitions for tile in tiles])
    item_pages = np.full((len(item_tile), _PAGES), -1)
    for item, (at_tile, partition) in enumerate(zip(item_tile, item_partition, strict=True)):
        pages = tiles[at_tile].pages[partition * _PAGES : (partition + 1) * _PAGES]
        item_pages[item, : len(pages)] = pages
    key_positions = item_partition[:, None] * PARTITION + np.arange(PARTITION)
    stale = key_positions >= np.asarray([tile.end for tile in tiles])[item_tile][:, None]
    stale |= np.repeat(item_pages < 0, PAGE_TOKENS, axis=1)
    partial = np.flatnonzero(stale.any(axis=1))
    query_positions = np.full((len(tiles), padded), -1)
    query_positions[:, : tokens * heads_per_kv_head] = np.repeat(positions, heads_per_kv_head, axis=1)
    at = query_positions[item_tile][:, :, None]
    hidden = key_positions[:, None, :] > at
    if window is not None:
        hidden |= (key_positions[:, None, :] >= window.sinks) & (key_positions[:, None, :] <= at - window.tokens)
    return _Group(
        rows=torch.from_numpy(rows),
        valid=torch.from_numpy(positions >= 0),
        item_tile=torch.from_numpy(item_tile),
        item_order=torch.from_numpy(np.concatenate([np.arange(count) for count in counts])),
        item_pages=torch.from_numpy(np.maximum(item_pages, 0).reshape(-1)),
        partial_items=torch.from_numpy(partial),
        stale=torch.from_numpy(stale[partial]),
        hidden=torch.from_numpy(hidden),
        partitions=max(counts),
    )


def attend(q: torch.Tensor, keys: Stored, values: Stored, plan: AttentionPlan, out: torch.Tensor) -> None:
    """Fills `out` [rows, heads * head_dim] from one layer's keys and values. `q`: [rows, heads, head_dim], as the keys are rotated."""
    rows, heads, dim = q.shape
    kv_heads = len(keys.numbers)
    q = (q * dim**-0.5).view(rows, kv_heads, heads // kv_heads, dim)
    out = out.view(rows, kv_heads, heads // kv_heads, dim)
    for group in plan.groups:
        tiles, tokens = group.rows.shape
        used = tokens * (heads // kv_heads)
        query = torch.zeros(kv_heads, tiles, group.hidden.shape[1], dim)
        query[:, :, :used] = q[group.rows].permute(2, 0, 1, 3, 4).reshape(kv_heads, tiles, used, dim)
        result = _combined(query, keys, values, group)[:, :, :used]
        result = result.view(kv_heads, tiles, tokens, heads // kv_heads, dim).permute(1, 2, 0, 3, 4)
        out[group.rows[group.valid]] = result[group.valid]


def _combined(query: torch.Tensor, keys: Stored, values: Stored, group: _Group) -> torch.Tensor:
    """[kv_heads, tiles, tile rows, head_dim]: softmax over all partitions of each tile."""
    kv_heads, tiles, size, dim = query.shape
    items = len(group.item_tile)
    near_keys = read(keys, group.item_pages).view(kv_heads * items, PARTITION, dim)
    near_values = read(values, group.item_pages).view(kv_heads, items, PARTITION, dim)
    # What another sequence left may be anything, even NaN, and zero times NaN is NaN.
    near_values[:, group.partial_items] = near_values[:, group.partial_items].masked_fill_(group.stale[None, :, :, None], 0)
    scores = torch.bmm(query.index_select(1, group.item_tile).view(kv_heads * items, size, dim), near_keys.transpose(1, 2))
    scores = scores.view(kv_heads, items, size, PARTITION).masked_fill_(group.hidden, -torch.inf)
    top = scores.amax(dim=-1)
    weights = scores.sub_(_finite(top)[..., None]).exp_()
    part = torch.bmm(weights.view(kv_heads * items, size, PARTITION), near_values.view(kv_heads * items, PARTITION, dim))
    shape = (kv_heads, tiles, group.partitions, size)
    tops, sums, parts = torch.full(shape, -torch.inf), torch.zeros(shape), torch.zeros(*shape, dim)
    at = (slice(None), group.item_tile, group.item_order)
    tops[at], sums[at], parts[at] = top, weights.sum(dim=-1), part.view(kv_heads, items, size, dim)
    factors = torch.exp(tops - _finite(tops.amax(dim=2, keepdim=True)))
    total, result = torch.zeros(kv_heads, tiles, size), torch.zeros(kv_heads, tiles, size, dim)
    for partition in range(group.partitions):
        total += factors[:, :, partition] * sums[:, :, partition]
        result += factors[:, :, partition, :, None] * parts[:, :, partition]
    return result / total[..., None]


def _finite(top: torch.Tensor) -> torch.Tensor:
    """Rows that see no key have -inf for their largest score; 0 instead gives them weights of 0, not NaN."""
    return torch.where(torch.isinf(top), 0.0, top)


def same_bits(tile_rows: tuple[int, ...], head_dim: int) -> tuple[int, ...]:
    """Those tile sizes whose matrix products give, row for row, the bits of the first one's on this machine."""
    generator = torch.Generator().manual_seed(0)
    rows = max(tile_rows)
    query, keys = torch.randn(2, rows, head_dim, generator=generator), torch.randn(2, PARTITION, head_dim, generator=generator)
    weights, values = torch.rand(2, rows, PARTITION, generator=generator), torch.randn(2, PARTITION, head_dim, generator=generator)

    def products(size: int) -> torch.Tensor:
        starts = range(0, rows, size)
        scores = [torch.bmm(query[:, start : start + size].contiguous(), keys.transpose(1, 2)) for start in starts]
        mixed = [torch.bmm(weights[:, start : start + size].contiguous(), values) for start in starts]
        return torch.cat([torch.cat(scores, dim=1), torch.cat(mixed, dim=1)], dim=2)

    wanted = products(tile_rows[0])
    return tuple(size for size in tile_rows if torch.equal(products(size), wanted))
