"""Hierarchical sparsity: the native selection against a PyTorch emulation of its boxes, what it reads, and where it is exact."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from test_cpu_kernels import LIMIT, TIERS, Sequence, Setting, rotated, tiers, value_scales, whole_weights
from transformers import AutoModelForCausalLM, LlamaConfig

from decodefleet.config import AgentConfig, Sparsity, SparsityPolicy
from decodefleet_agent.engine.backends import native
from decodefleet_agent.engine.backends.choice import VARIABLE, choose
from decodefleet_agent.engine.backends.cpu import CpuBackend
from decodefleet_agent.engine.backends.native import KVFormat
from decodefleet_agent.engine.batch import Batch, Span
from decodefleet_agent.engine.kv_pool import pages_for
from decodefleet_agent.engine.weights import load
from decodefleet_agent.model_files import ModelError

pytestmark = pytest.mark.skipif(not native.LIBRARY.exists(), reason="the native library was not built: there is no C++ compiler")
FAN, CENTRE_PAGES = 8, 8


@pytest.fixture(params=TIERS)
def tier(request: pytest.FixtureRequest) -> bytes:
    if native.tier(request.param) is None:
        pytest.skip(f"this processor has no {request.param}")
    return request.param.encode()


def four_bits(x: torch.Tensor) -> torch.Tensor:
    """What is left of [nodes, values] after four bits with one scale for each node."""
    top = x.abs().amax(dim=1, keepdim=True)
    return torch.round(x * torch.div(torch.tensor(7.0), top)) * torch.div(top, 7)


@dataclass
class Hierarchical(Setting):
    """Emulates the summaries and the selection; `stored` queries come as attention sees them."""

    policy: native.SparsityPolicy = native.SparsityPolicy.Hierarchical
    budget: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        self.model.budget = self.budget
        self.page_bytes = native.library().df_page_bytes(ctypes.byref(self.model))

    def slow(self, x: torch.Tensor) -> torch.Tensor:
        """[..., dim / 2]: of stored keys or queries, the half of the dimensions that turn slowest with the position, mixed."""
        low, high = rotated(x.float(), 64).chunk(2, dim=-1)
        quarter = self.dim // 4
        return rotated(torch.cat([low[..., quarter:], high[..., quarter:]], dim=-1), 64 if self.dim == 128 else 32)

    def sketched(self, keys: torch.Tensor) -> torch.Tensor:
        """Of [tokens, dim]: what is left of the slow half of each page's keys, [pages, 16, dim / 2]."""
        pages = keys.unflatten(0, (-1, 16))
        first = torch.arange(len(pages)).clamp(max=CENTRE_PAGES - 1)
        means = pages[:CENTRE_PAGES].mean(dim=1).cumsum(dim=0) / torch.arange(1, min(len(pages), CENTRE_PAGES) + 1)[:, None]
        slow = self.slow(pages - means[first, None])
        sizes = slow.abs().sum(dim=-1, keepdim=True)
        step = sizes.amax(dim=1, keepdim=True) / 255
        return torch.where(slow >= 0, 1.0, -1.0) * torch.round(sizes / step) * step / (self.dim // 2)

    def levels(self, keys: torch.Tensor) -> list[torch.Tensor]:
        """Of [tokens, dim], for level 2 and each above: [nodes, 2 * dim], high values, then low."""
        pages = rotated(keys.float(), 64).unflatten(0, (-1, 16))
        high, low = pages.amax(dim=1), pages.amin(dim=1)
        result = [torch.cat([0.75 * high + 0.25 * low, 0.25 * high + 0.75 * low], dim=1)]
        while len(result[-1]) >= FAN:
            groups = result[-1][: len(result[-1]) // FAN * FAN].unflatten(0, (-1, FAN))
            high, low = groups.split(self.dim, dim=2)
            result.append(four_bits(torch.cat([high.amax(dim=1), low.amin(dim=1)], dim=1)))
        return result[1:]

    def pages_of(self, query: torch.Tensor, keys: torch.Tensor, position: int) -> list[int]:
        """Of the row's [heads of one key-value head, dim]."""
        begin = -(-self.sinks // 16)
        end = max(begin, max(0, position - self.window + 1) // 16)
        room = self.budget // 16
        always = [page for page in range(position // 16 + 1) if page < begin or page >= end]
        if end - begin <= room:
            return sorted([*always, *range(begin, end)])
        turned = rotated(query.float(), 64)
        ends = torch.cat([turned.clamp(min=0), turned.clamp(max=0)], dim=1).sum(dim=0)
        ends = torch.round(ends * (32767 / ends.abs().amax())).double()
        unit = query.abs().amax(dim=1, keepdim=True) / 127
        slow = self.slow(torch.round(query / unit))
        most = slow.abs().amax(dim=1, keepdim=True)
        slow = torch.round(slow * torch.div(torch.tensor(31.0), most)) * most / 31 * unit.float()
        boxes, sketched = self.levels(keys[: end * 16]), self.sketched(keys[: end * 16])
        counts = [end, *(max(0, end - level + 2) // FAN ** (level - 1) for level in range(2, len(boxes) + 2)), 0]
        kept: list[int] = []
        for level in range(len(boxes) + 1, 0, -1):
            if not counts[level - 1]:
                continue
            nodes = [node * FAN + child for node in kept for child in range(FAN)] + list(range(counts[level] * FAN, counts[level - 1]))
            nodes = [node for node in nodes if (node + 1) * FAN ** (level - 1) > begin]
            if level > 1:
                scores, most_kept = boxes[level - 2][nodes].double() @ ends, max(2, -(-room // 2))
            else:
                scores = torch.softmax((slow @ sketched[nodes].mT).amax(dim=-1) / self.dim**0.5, dim=0).sum(dim=1)
                most_kept = room
            kept = sorted(nodes[index] for index in torch.argsort(scores, descending=True, stable=True)[:most_kept])
        return sorted([*always, *kept])

    def attention(self, sequence: Sequence, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        start, group = len(sequence.keys), self.heads // self.kv_heads
        q, k, v = qkv.unflatten(-1, (-1, self.dim)).split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        sequence.keys = torch.cat([sequence.keys, self.stored(self.turned(k, start))])
        sequence.values = torch.cat([sequence.values, self.stored(v)])
        sequence.value_scales = torch.cat([sequence.value_scales, value_scales(v)])
        query = self.stored(self.turned(q, start))
        mixed, off = torch.empty_like(query), torch.empty_like(query)
        for row in range(len(q)):
            for head in range(self.kv_heads):
                heads, keys = slice(head * group, (head + 1) * group), sequence.keys[:, head]
                pages = self.pages_of(query[row, heads], keys, start + row)
                at = torch.tensor([page * 16 + slot for page in pages for slot in range(16) if page * 16 + slot <= start + row])
                weights = torch.softmax(query[row, heads] @ keys[at].T / self.dim**0.5, dim=1)
                weights, doubt = whole_weights(weights, sequence.value_scales[at, head])
                mixed[row, heads] = weights @ sequence.values[at, head]
                off[row, heads] = (doubt @ sequence.values[at, head].norm(dim=-1))[:, None]
        return rotated(mixed, 64).flatten(1), off.flatten(1)


@pytest.mark.parametrize(("sinks", "window", "budget"), [(16, 32, 64), (5, 16, 16), (40, 100, 176), (0, 20, 48), (16, 256, 512)])
def test_selection(sinks: int, window: int, budget: int) -> None:
    """In chunks cut anywhere, by one thread or two; pages of a chunk are picked in that chunk."""
    setting = Hierarchical(6, 2, 64, KVFormat.int8, sinks=sinks, window=window, budget=budget)
    generator = np.random.default_rng(budget)
    free = generator.permutation(setting.pages).tolist()
    nothing = torch.zeros(0, 2, 64, dtype=torch.float64)
    pools = [np.full(setting.pages * setting.page_bytes // 4, np.nan, np.float32) for _ in range(2 * len(tiers()))]
    sequences = [Sequence([free.pop() for _ in range(count)], nothing, nothing, nothing[..., 0]) for count in (69, 30)]
    for lengths in ((700, 37), (1, 300), (300, 1), (1, 1), (90, 0), (1, 0)):
        spans = [(sequence, length) for sequence, length in zip(sequences, lengths, strict=True) if length]
        qkv = generator.normal(size=(sum(lengths), 10 * 64)).astype(np.float32)
        ways = ((tier, threads) for tier in tiers() for threads in (1, 2))
        got = [setting.native(*way, pool, spans, qkv) for way, pool in zip(ways, pools, strict=True)]
        parts = torch.from_numpy(qkv).split([length for _, length in spans])
        wanted, off = map(
            torch.cat, zip(*(setting.attention(sequence, part) for (sequence, _), part in zip(spans, parts, strict=True)), strict=True)
        )
        beyond = (torch.from_numpy(got[0]).double() - wanted).abs() > LIMIT * wanted.abs().max() + off
        # A query's last bit may be another one in fp32, and then its choice between pages of nearly the same score.
        assert beyond.any(dim=1).sum() <= len(qkv) / 100
        for other in got[1:]:
            assert np.array_equal(other, got[0])


def test_each_head_of_a_group_finds_the_page_that_holds_its_softmax(tier: bytes) -> None:
    """Also beside a head whose scores are larger and which many pages serve as well as any other."""
    setting = Hierarchical(2, 1, 64, KVFormat.int8, sinks=16, window=16, budget=64)
    generator = np.random.default_rng(5)
    loud, quiet = np.zeros(64, np.float32), np.zeros(64, np.float32)
    loud[[28, 61]], quiet[[30, 63]] = 1, 1  # dimensions that hardly turn within these tokens
    for needle in (3, 17, 33):
        keys = generator.normal(scale=0.1, size=(640, 64)).astype(np.float32)
        keys += loud * generator.uniform(3.5, 4, size=(640, 1)).astype(np.float32)
        keys[needle * 16 + 5] += 4 * quiet
        values = np.zeros((640, 64), np.float32)
        values[needle * 16 + 5] = 1
        queries = np.stack([30 * loud, 12 * quiet])
        qkv = np.concatenate([np.tile(queries.ravel(), (640, 1)), keys, values], axis=1).astype(np.float32)
        pool = np.zeros(setting.pages * setting.page_bytes // 4, np.float32)
        nothing = torch.zeros(0, 1, 64, dtype=torch.float64)
        got = setting.native(tier, 1, pool, [(Sequence(list(range(40)), nothing, nothing, nothing[..., 0]), 640)], qkv)
        assert (got[-1, 64:] > 0.9).all(), needle


def test_all_is_read_where_it_fits_and_gives_the_bits_of_exact_attention(tier: bytes) -> None:
    exact = Setting(9, 3, 64, KVFormat.int8)
    sparse = Hierarchical(9, 3, 64, KVFormat.int8, sinks=16, window=64, budget=512)
    qkv = np.random.default_rng(1).normal(size=(592, 15 * 64)).astype(np.float32)
    nothing = torch.zeros(0, 3, 64, dtype=torch.float64)
    results = []
    for setting in (exact, sparse):
        pool = np.zeros(setting.pages * setting.page_bytes // 4, np.float32)
        results.append(setting.native(tier, 1, pool, [(Sequence(list(range(37)), nothing, nothing, nothing[..., 0]), 592)], qkv))
    assert np.array_equal(*results)


def test_a_step_at_2048_tokens_reads_at_most_860(tmp_path: Path) -> None:
    sizes = {"hidden_size": 96, "intermediate_size": 160, "head_dim": 64, "num_attention_heads": 6, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=64, num_hidden_layers=2, max_position_embeddings=8192, **sizes)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    counts = {}
    for policy in (SparsityPolicy.None_, SparsityPolicy.SlidingWindow, SparsityPolicy.Hierarchical):
        backend = CpuBackend(1, sparsity=Sparsity(policy=policy))
        backend.prepare(load(tmp_path), 8192, lambda done, what: None)
        backend.allocate(pages_for(8192))
        for context in (512, 2048, 8192):
            before = backend.bytes_read()
            backend.step(Batch(np.zeros(1, np.int64), (Span(1, tuple(range(pages_for(context))), context - 1, 1, samples=True),)))
            counts[policy.value, context] = (backend.bytes_read() - before) / (2 * 2 * (2 * 64 + 8))
    assert [counts["None", context] for context in (512, 2048, 8192)] == [512, 2048, 8192]
    assert counts["SlidingWindow", 8192] == counts["SlidingWindow", 512] == 272
    assert counts["Hierarchical", 512] == 512
    assert 784 < counts["Hierarchical", 2048] <= 860 and counts["Hierarchical", 8192] <= 920


def test_hierarchical_needs_int8() -> None:
    for kv_format in (KVFormat.fp32, KVFormat.fp8):
        with pytest.raises(ModelError, match=r"set engine\.precision\.kvCache to int8 or auto"):
            CpuBackend(1, kv_format, sparsity=Sparsity(policy=SparsityPolicy.Hierarchical))


def test_the_reference_does_not_select(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "reference")
    config = AgentConfig.model_validate({"modelUri": "file:///m", "engine": {"kvCache": {"sparsity": {"policy": "Hierarchical"}}}})
    with pytest.raises(ModelError, match="set None or SlidingWindow"):
        choose(config, None, 1)  # type: ignore[arg-type]


def test_summaries_leave_a_page_below_29_percent_of_fp32() -> None:
    assert Hierarchical(9, 3, 64, KVFormat.int8).page_bytes <= 0.29 * Setting(9, 3, 64, KVFormat.fp32).page_bytes
    assert math.isclose(Hierarchical(9, 3, 64, KVFormat.int8).page_bytes, 3 * 2328)
