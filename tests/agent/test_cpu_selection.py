"""Hierarchical sparsity: the native selection against a PyTorch emulation of its int8 summaries, what it reads, and where it is exact."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from test_cpu_kernels import LIMIT, TIERS, Sequence, Setting, error, int8, rotated

from decodefleet_agent.engine.backends import native
from decodefleet_agent.engine.backends.native import KVFormat

pytestmark = pytest.mark.skipif(not native.LIBRARY.exists(), reason="the native library was not built: there is no C++ compiler")
FAN = 8


@pytest.fixture(params=TIERS)
def tier(request: pytest.FixtureRequest) -> bytes:
    if native.tier(request.param) is None:
        pytest.skip(f"this processor has no {request.param}")
    return request.param.encode()


@dataclass
class Hierarchical(Setting):
    """Emulates the summaries and the selection; `stored` queries come as attention sees them."""

    policy: native.SparsityPolicy = native.SparsityPolicy.Hierarchical
    budget: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        self.model.budget = self.budget
        self.page_bytes = native.library().df_page_bytes(ctypes.byref(self.model))

    def levels(self, keys: torch.Tensor) -> list[torch.Tensor]:
        """Of [tokens, dim]: for each level [nodes, 2 * dim], the largest values, then the smallest."""
        pages = keys[: len(keys) // 16 * 16].unflatten(0, (-1, 16))
        result = [int8(torch.cat([pages.amax(dim=1), pages.amin(dim=1)], dim=1).float(), 2 * self.dim)]
        while len(result[-1]) >= FAN:
            groups = result[-1][: len(result[-1]) // FAN * FAN].unflatten(0, (-1, FAN))
            high, low = groups.split(self.dim, dim=2)
            result.append(int8(torch.cat([high.amax(dim=1), low.amin(dim=1)], dim=1).float(), 2 * self.dim))
        return result

    def pages_of(self, query: torch.Tensor, keys: torch.Tensor, position: int) -> list[int]:
        """Of the row's [heads of one key-value head, dim]."""
        begin = -(-self.sinks // 16)
        end = max(begin, max(0, position - self.window + 1) // 16)
        room = self.budget // 16
        always = [page for page in range(position // 16 + 1) if page < begin or page >= end]
        if end - begin <= room:
            return sorted([*always, *range(begin, end)])
        ends = torch.cat([query.clamp(min=0), query.clamp(max=0)], dim=1)
        levels = self.levels(keys[: end * 16])
        counts = [end, *(max(0, end - level + 2) // FAN ** (level - 1) for level in range(2, len(levels) + 2)), 0]
        kept: list[int] = []
        for level in range(len(levels) + 1, 0, -1):
            if not counts[level - 1]:
                continue
            nodes = [node * FAN + child for node in kept for child in range(FAN)] + list(range(counts[level] * FAN, counts[level - 1]))
            nodes = [node for node in nodes if (node + 1) * FAN ** (level - 1) > begin]
            scores = (levels[level - 1][nodes] @ ends.T).sum(dim=1)
            most = room if level == 1 else max(2, -(-room // 4))
            kept = sorted(nodes[index] for index in torch.argsort(scores, descending=True, stable=True)[:most])
        return sorted([*always, *kept])

    def attention(self, sequence: Sequence, qkv: torch.Tensor) -> torch.Tensor:
        start, group = len(sequence.keys), self.heads // self.kv_heads
        q, k, v = qkv.unflatten(-1, (-1, self.dim)).split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        sequence.keys = torch.cat([sequence.keys, self.stored(self.turned(k, start))])
        sequence.values = torch.cat([sequence.values, self.stored(v)])
        query = self.stored(self.turned(q, start))
        mixed = torch.empty_like(query)
        for row in range(len(q)):
            for head in range(self.kv_heads):
                heads, keys = slice(head * group, (head + 1) * group), sequence.keys[:, head]
                pages = self.pages_of(query[row, heads], keys, start + row)
                at = torch.tensor([page * 16 + slot for page in pages for slot in range(16) if page * 16 + slot <= start + row])
                weights = torch.softmax(query[row, heads] @ keys[at].T / self.dim**0.5, dim=1)
                mixed[row, heads] = weights @ sequence.values[at, head]
        return rotated(mixed, 64).flatten(1)


@pytest.mark.parametrize(("sinks", "window", "budget"), [(16, 32, 64), (5, 16, 16), (40, 100, 176), (0, 20, 48), (16, 256, 512)])
def test_selection(tier: bytes, sinks: int, window: int, budget: int) -> None:
    """In chunks cut anywhere, by one thread or two; pages of a chunk are picked in that chunk."""
    setting = Hierarchical(6, 2, 64, KVFormat.int8, sinks=sinks, window=window, budget=budget)
    generator = np.random.default_rng(budget)
    free = generator.permutation(setting.pages).tolist()
    nothing = torch.zeros(0, 2, 64, dtype=torch.float64)
    pools = [np.full(setting.pages * setting.page_bytes // 4, np.nan, np.float32) for _ in range(2)]
    sequences = [Sequence([free.pop() for _ in range(count)], nothing, nothing) for count in (69, 30)]
    for lengths in ((700, 37), (1, 300), (300, 1), (1, 1), (90, 0), (1, 0)):
        spans = [(sequence, length) for sequence, length in zip(sequences, lengths, strict=True) if length]
        qkv = generator.normal(size=(sum(lengths), 10 * 64)).astype(np.float32)
        got = [setting.native(tier, threads, pool, spans, qkv) for threads, pool in zip((1, 2), pools, strict=True)]
        parts = torch.from_numpy(qkv).split([length for _, length in spans])
        wanted = torch.cat([setting.attention(sequence, part) for (sequence, _), part in zip(spans, parts, strict=True)])
        assert error(got[0], wanted) <= LIMIT
        assert np.array_equal(*got)


def test_all_is_read_where_it_fits_and_gives_the_bits_of_exact_attention(tier: bytes) -> None:
    exact = Setting(9, 3, 64, KVFormat.int8)
    sparse = Hierarchical(9, 3, 64, KVFormat.int8, sinks=16, window=64, budget=512)
    qkv = np.random.default_rng(1).normal(size=(592, 15 * 64)).astype(np.float32)
    nothing = torch.zeros(0, 3, 64, dtype=torch.float64)
    results = []
    for setting in (exact, sparse):
        pool = np.zeros(setting.pages * setting.page_bytes // 4, np.float32)
        results.append(setting.native(tier, 1, pool, [(Sequence(list(range(37)), nothing, nothing), 592)], qkv))
    assert np.array_equal(*results)


def test_summaries_leave_a_page_below_30_percent_of_fp32() -> None:
    assert Hierarchical(9, 3, 64, KVFormat.int8).page_bytes <= 0.3 * Setting(9, 3, 64, KVFormat.fp32).page_bytes
    assert math.isclose(Hierarchical(9, 3, 64, KVFormat.int8).page_bytes, 3 * 2440)
