"""Attention of the reference backend: query tiles of one sequence against fixed partitions of its pages, combined in order."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from decodefleet_agent.engine.batch import Batch
from decodefleet_agent.engine.kv_pool import PAGE_TOKENS

PARTITION = 256
TILE = 16
_PAGES = PARTITION // PAGE_TOKENS
_ITEMS = 192  # partitions computed at once: bounds the memory of gathered keys and values


@dataclass(frozen=True)
class _Group:
    """Query tiles that are computed together. An item is one tile against one partition."""

    rows: torch.Tensor  # [tiles, tokens] row in the batch; 0 where the tile has no token
    valid: torch.Tensor  # [tiles, tokens]
    item_tile: torch.Tensor  # [items]
    item_partition: torch.Tensor  # [items]
    item_pages: torch.Tensor  # [items, 16] page numbers; 0 beyond the sequence
    stale: torch.Tensor  # [items, 256] positions that hold no key of the sequence
    hidden: torch.Tensor  # [items, tile rows, 256] keys that a query row does not see
    partitions: int


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
    rows: list[int]
    positions: list[int]
    pages: tuple[int, ...]
    end: int  # tokens of the sequence in the pool after this step


def plan_attention(batch: Batch, group: int) -> AttentionPlan:
    """`group`: query heads per key-value head. A tile holds as many tokens as fill 16 query rows."""
    tokens = max(1, TILE // group)
    positions: list[int] = []
    pages: list[int] = []
    sampled: list[int] = []
    tiles: list[_Tile] = []
    for span in batch.spans:
        first, end = len(positions), span.start + span.length
        positions += range(span.start, end)
        pages += [span.pages[position // PAGE_TOKENS] for position in range(span.start, end)]
        if span.samples:
            sampled.append(len(positions) - 1)
        for start in range(0, span.length, tokens):
            count = min(tokens, span.length - start)
            where = range(span.start + start, span.start + start + count)
            tiles.append(_Tile(list(range(first + start, first + start + count)), list(where), span.pages, end))
    at = torch.tensor(positions, dtype=torch.long)
    groups = [_group(part, tokens, group) for part in _split(tiles)]
    return AttentionPlan(at, torch.tensor(pages, dtype=torch.long), at % PAGE_TOKENS, torch.tensor(sampled, dtype=torch.long), groups)


def _partitions(tile: _Tile) -> int:
    return tile.positions[-1] // PARTITION + 1


def _split(tiles: list[_Tile]) -> list[list[_Tile]]:
    parts: list[list[_Tile]] = []
    items = _ITEMS
    for tile in tiles:
        if items + _partitions(tile) > _ITEMS:
            parts.append([])
            items = 0
        parts[-1].append(tile)
        items += _partitions(tile)
    return parts


def _group(tiles: list[_Tile], tokens: int, group: int) -> _Group:
    padded = -(-tokens * group // TILE) * TILE
    rows = np.zeros((len(tiles), tokens), np.int64)
    positions = np.full((len(tiles), tokens), -1)
    item_tile: list[int] = []
    item_partition: list[int] = []
    for index, tile in enumerate(tiles):
        rows[index, : len(tile.rows)] = tile.rows
        positions[index, : len(tile.rows)] = tile.positions
        item_tile += [index] * _partitions(tile)
        item_partition += range(_partitions(tile))
    item_pages = np.zeros((len(item_tile), _PAGES), np.int64)
    for item, (index, partition) in enumerate(zip(item_tile, item_partition, strict=True)):
        pages = tiles[index].pages[partition * _PAGES : (partition + 1) * _PAGES]
        item_pages[item, : len(pages)] = pages
    key_positions = np.asarray(item_partition)[:, None] * PARTITION + np.arange(PARTITION)
    ends = np.asarray([tiles[index].end for index in item_tile])
    query_positions = np.full((len(tiles), padded), -1)
    query_positions[:, : tokens * group] = np.repeat(positions, group, axis=1)
    hidden = key_positions[:, None, :] > query_positions[item_tile][:, :, None]
    return _Group(
        rows=torch.from_numpy(rows),
        valid=torch.from_numpy(positions >= 0),
        item_tile=torch.tensor(item_tile),
        item_partition=torch.tensor(item_partition),
        item_pages=torch.from_numpy(item_pages),
        stale=torch.from_numpy(key_positions >= ends[:, None]),
        hidden=torch.from_numpy(hidden),
        partitions=max(item_partition) + 1,
    )


def attend(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, plan: AttentionPlan, out: torch.Tensor) -> None:
    """Fills `out` [rows, heads * head_dim]. `q`: [rows, heads, head_dim], rotated. `keys`, `values`: [kv_heads, pages, 16, head_dim]."""
    rows, heads, dim = q.shape
    kv_heads = len(keys)
    q = (q * dim**-0.5).view(rows, kv_heads, heads // kv_heads, dim)
    out = out.view(rows, kv_heads, heads // kv_heads, dim)
    for group in plan.groups:
        tiles, tokens = group.rows.shape
        size = group.hidden.shape[1]
        used = tokens * (heads // kv_heads)
        query = torch.zeros(kv_heads, tiles, size, dim)
        query[:, :, :used] = q[group.rows].permute(2, 0, 1, 3, 4).reshape(kv_heads, tiles, used, dim)
        result = _combined(query, keys, values, group)[:, :, :used]
        result = result.view(kv_heads, tiles, tokens, heads // kv_heads, dim).permute(1, 2, 0, 3, 4)
        out[group.rows[group.valid]] = result[group.valid]


def _combined(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, group: _Group) -> torch.Tensor:
    """[kv_heads, tiles, tile rows, head_dim]: softmax over all partitions of each tile."""
    kv_heads, tiles, size, dim = query.shape
    items = len(group.item_tile)
    gathered_keys = keys[:, group.item_pages].view(kv_heads * items, PARTITION, dim)
    # Another sequence's numbers may be anything, even NaN, and zero times NaN is NaN.
    gathered_values = values[:, group.item_pages].view(kv_heads, items, PARTITION, dim).masked_fill_(group.stale[None, :, :, None], 0)
    scores = torch.bmm(query[:, group.item_tile].view(kv_heads * items, size, dim), gathered_keys.transpose(1, 2))
    scores = scores.view(kv_heads, items, size, PARTITION).masked_fill_(group.hidden, -torch.inf)
    top = scores.amax(dim=-1)
    weights = torch.exp(scores - _finite(top)[..., None])
    shape = (kv_heads, tiles, group.partitions, size)
    tops = torch.full(shape, -torch.inf)
    sums, parts = torch.zeros(shape), torch.zeros(*shape, dim)
    at = (slice(None), group.item_tile, group.item_partition)
    tops[at] = top
    sums[at] = weights.sum(dim=-1)
    parts[at] = torch.bmm(weights.view(kv_heads * items, size, PARTITION), gathered_values.view(kv_heads * items, PARTITION, dim)).view(
        kv_heads, items, size, dim
    )
    factors = torch.exp(tops - _finite(tops.amax(dim=2, keepdim=True)))
    total, result = torch.zeros(kv_heads, tiles, size), torch.zeros(kv_heads, tiles, size, dim)
    for partition in range(group.partitions):
        total += factors[:, :, partition] * sums[:, :, partition]
        result += factors[:, :, partition, :, None] * parts[:, :, partition]
    return result / total[..., None]


def _finite(top: torch.Tensor) -> torch.Tensor:
    """Rows that see no key have -inf for their largest score; 0 instead gives them weights of 0, not NaN."""
    return torch.where(torch.isinf(top), 0.0, top)
