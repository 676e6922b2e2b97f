"""A batch as the cuda backend's kernels read it: whole numbers in one array, so that one copy takes them to the GPU."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from decodefleet_agent.engine.backends.triton_kernels import PARTITION, Tiles
from decodefleet_agent.engine.batch import Batch, Span
from decodefleet_agent.engine.kv_pool import PAGE_TOKENS

_ALIGNMENT = 32  # numbers; fields begin there, so that every batch's addresses are equally aligned


@dataclass(frozen=True)
class Plan:
    """`numbers` holds the fields one after the other, as `views` cuts them."""

    numbers: np.ndarray  # int32
    shapes: tuple[tuple[int, ...], ...]  # of the fields, in the order of `Views`
    partitions: int


@dataclass(frozen=True)
class Views:
    """int32 tensors of one plan."""

    token_ids: torch.Tensor  # [rows]
    positions: torch.Tensor  # [rows]
    slots: torch.Tensor  # [rows] page * 16 + token in the page
    sampled: torch.Tensor  # [samples] rows
    tiles: Tiles
    page_table: torch.Tensor  # [spans, pages]


def plan(batch: Batch, tile_tokens: int, pages: int | None = None) -> Plan:
    """`tile_tokens`: of one sequence, attended to together. `pages`: width of the page table, what the batch needs by default."""
    spans = batch.spans
    lengths = np.array([span.length for span in spans], np.int64)
    starts = np.array([span.start for span in spans], np.int64)
    firsts = np.cumsum(lengths) - lengths
    width = pages or max((len(span.pages) for span in spans), default=1)
    table = np.zeros((len(spans), width), np.int64)
    for line, span in zip(table, spans, strict=True):
        used = span.pages[:width]
        line[: len(used)] = used
    of_row = np.repeat(np.arange(len(spans)), lengths)
    positions = np.arange(len(of_row)) - firsts[of_row] + starts[of_row]
    slots = table[of_row, positions // PAGE_TOKENS] * PAGE_TOKENS + positions % PAGE_TOKENS
    sampled = (firsts + lengths - 1)[np.array([span.samples for span in spans], bool)]

    of_tile = np.repeat(np.arange(len(spans)), -(-lengths // tile_tokens))
    first_tile = np.searchsorted(of_tile, np.arange(len(spans)))
    offset = (np.arange(len(of_tile)) - first_tile[of_tile]) * tile_tokens
    tokens = np.minimum(tile_tokens, lengths[of_tile] - offset)
    fields = (
        batch.token_ids, positions, slots, sampled,
        firsts[of_tile] + offset, tokens, starts[of_tile] + offset, of_tile, table,
    )  # fmt: skip
    longest = width * PAGE_TOKENS if pages else int((starts + lengths).max(initial=1))
    return Plan(_packed(fields), tuple(field.shape for field in fields), -(-longest // PARTITION))


def views(numbers: torch.Tensor, shapes: tuple[tuple[int, ...], ...]) -> Views:
    """The fields of a plan whose numbers were copied to this tensor."""
    fields, start = [], 0
    for shape in shapes:
        size = int(np.prod(shape))
        fields.append(numbers[start : start + size].view(shape))
        start += -(-size // _ALIGNMENT) * _ALIGNMENT
    token_ids, positions, slots, sampled, *tiles, table = fields
    return Views(token_ids, positions, slots, sampled, Tiles(*tiles), table)


def padded_decode(batch: Batch, scratch_page: int) -> Batch | None:
    """A batch of decoding rows filled up to a power of two with rows that write to a page of nobody; None of another batch."""
    if not batch.spans or any(span.length != 1 or not span.samples for span in batch.spans):
        return None
    size = 1 << (batch.rows - 1).bit_length()
    nobody = tuple(Span(-1, (scratch_page,), 0, 1, samples=True) for _ in range(size - batch.rows))
    return Batch(np.concatenate([batch.token_ids, np.zeros(len(nobody), np.int64)]), (*batch.spans, *nobody))


def _packed(fields: tuple[np.ndarray, ...]) -> np.ndarray:
    sizes = [-(-field.size // _ALIGNMENT) * _ALIGNMENT for field in fields]
    numbers = np.zeros(sum(sizes), np.int32)
    for field, end, size in zip(fields, np.cumsum(sizes), sizes, strict=True):
        numbers[end - size : end - size + field.size] = field.reshape(-1)
    return numbers
