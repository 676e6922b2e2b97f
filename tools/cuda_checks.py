"""Checks of the cuda backend, each a figure and its limit: on a GPU for `make gpu-check`, in Triton's interpreter for the tests.

The emulations compute in fp64 from the same quantised numbers. Nothing here needs more than NumPy, PyTorch and Triton.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from decodefleet_agent.engine.backends.cuda import CudaBackend
from decodefleet_agent.engine.backends.cuda_plan import plan, views
from decodefleet_agent.engine.backends.packing import rotate
from decodefleet_agent.engine.backends.triton_kernels import DEVICE, INTERPRETED, Pool, tile_rows
from decodefleet_agent.engine.backends.triton_kernels.attention import attend
from decodefleet_agent.engine.backends.triton_kernels.elementwise import rms_norm, swiglu
from decodefleet_agent.engine.backends.triton_kernels.linear import linear
from decodefleet_agent.engine.backends.triton_kernels.pool import write
from decodefleet_agent.engine.backends.triton_kernels.sampling import sample
from decodefleet_agent.engine.batch import Batch, Span

if INTERPRETED:
    from triton.runtime import interpreter

    def dot(self: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
        """The interpreter's own asks a BLAS, whose rows get other bits at other places of a tile; a GPU's do not."""
        result = d.data.copy()
        for depth in range(a.data.shape[1]):
            result += a.data[:, depth, None].astype(d.data.dtype) * b.data[depth]
        return interpreter.TensorHandle(result, d.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = dot

EXACT = 1e-5
ROTATED = 64
# The interpreter multiplies fp16 and not bf16.
SHORT = torch.float16 if INTERPRETED else torch.bfloat16


@dataclass(frozen=True)
class Check:
    name: str
    figure: float
    limit: float
    at_least: bool = False  # else at most

    @property
    def passed(self) -> bool:
        return self.figure >= self.limit if self.at_least else self.figure <= self.limit

    def __str__(self) -> str:
        sign = "≥" if self.at_least else "≤"
        return f"{'ok  ' if self.passed else 'FAIL'} {self.name}: {self.figure:.4g} (limit {sign} {self.limit:g})"


def error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Largest difference, relative to the largest value; infinite where something is not a number."""
    difference = float((got.double() - wanted.double()).abs().max() / wanted.double().abs().max())
    return difference if math.isfinite(difference) else math.inf


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def products() -> Iterator[Check]:
    for dtype in (torch.float32, SHORT):
        x, weight, bias = normal(19, 160, dtype=dtype), normal(70, 160, seed=1, dtype=dtype), normal(70, seed=2)
        wanted = x.double() @ weight.double().T
        yield Check(f"linear {dtype}", error(linear(x, weight, bias), wanted + bias), EXACT)
        yield Check(f"linear {dtype} added to what is there", error(linear(x, weight, out=normal(19, 70)), wanted + normal(19, 70)), EXACT)
        whole = linear(x, weight)
        apart = torch.cat([linear(x[:3].contiguous(), weight), *(linear(x[row : row + 1].contiguous(), weight) for row in range(3, 19))])
        yield Check(f"linear {dtype}: values that differ with the rows beside them", int((whole != apart).sum()), 0)


def elementwise() -> Iterator[Check]:
    x, weight = normal(5, 96) / 100, normal(96, seed=1)  # so small that epsilon counts
    wanted = x.double() * torch.rsqrt((x.double() ** 2).mean(1, keepdim=True) + 1e-5) * weight
    picked = torch.tensor([4, 0], dtype=torch.int32, device=DEVICE)
    yield Check("rms_norm", error(rms_norm(x, weight, 1e-5, torch.float32), wanted), EXACT)
    yield Check("rms_norm of picked rows", error(rms_norm(x, weight, 1e-5, torch.float32, picked), wanted[[4, 0]]), EXACT)
    gate_up = normal(5, 192)
    gate, up = gate_up.double().chunk(2, dim=1)
    yield Check("swiglu", error(swiglu(gate_up, torch.float32), gate * torch.sigmoid(gate) * up), EXACT)


def empty_pool(kv_heads: int, pages: int, dim: int) -> Pool:
    """As others may leave it: any values, scales that are no numbers."""
    slots = pages * 16
    keys, values = (torch.randint(-128, 128, (kv_heads, slots, dim), dtype=torch.int8, device=DEVICE) for _ in range(2))
    return Pool(keys, values, *(torch.full((kv_heads, slots), math.nan, device=DEVICE) for _ in range(2)))


def rotation(dim: int) -> torch.Tensor:
    return rotate(torch.eye(dim), ROTATED).to(DEVICE)


def writing(heads: int = 6, kv_heads: int = 2, dim: int = 64) -> Iterator[Check]:
    rows = 7
    qkv = normal(rows, (heads + 2 * kv_heads) * dim)
    qkv[3, heads * dim : (heads + 1) * dim] = 0  # a key of zeros
    positions = torch.arange(rows, dtype=torch.int32, device=DEVICE) * 3
    slots = torch.tensor([40, 3, 17, 18, 0, 63, 9], dtype=torch.int32, device=DEVICE)
    angles = torch.arange(32, device=DEVICE)[:, None] * normal(dim // 2, seed=3).abs()
    pool = empty_pool(kv_heads, 4, dim)
    queries = write(qkv, positions, slots, (angles.cos(), angles.sin()), rotation(dim), pool)

    parts = qkv.double().view(rows, -1, dim)
    cos, sin = angles.double().cos()[positions][:, None], angles.double().sin()[positions][:, None]
    low, high = parts[:, : heads + kv_heads].chunk(2, dim=2)
    turned = torch.cat([low * cos - high * sin, high * cos + low * sin], dim=2)
    everything = torch.cat([turned, parts[:, heads + kv_heads :]], dim=1) @ rotation(dim).double()
    yield Check(f"queries, heads of {dim}", error(queries, everything[:, :heads] * dim**-0.5), EXACT)
    stored = (("keys", pool.keys, pool.key_scales, heads), ("values", pool.values, pool.value_scales, heads + kv_heads))
    for name, int8, scales, first in stored:
        wanted = everything[:, first : first + kv_heads].transpose(0, 1)
        top = wanted.abs().amax(dim=2)
        whole = torch.where(top[..., None] > 0, torch.floor(wanted * 127 / top[..., None] + 0.5), 0)
        off = (int8[:, slots.long()].double() - whole).abs()
        yield Check(f"scales of {name}, heads of {dim}", error(scales[:, slots.long()], top / 127), EXACT)
        yield Check(f"int8 {name} of heads of {dim}: share that a rounding puts one step aside", float((off == 1).double().mean()), 3e-3)
        yield Check(f"int8 {name} of heads of {dim}: most steps aside", float(off.max()), 1)


def attention(heads: int = 6, kv_heads: int = 2, dim: int = 64, dtype: torch.dtype = torch.float32) -> Iterator[Check]:
    """A chunk, a long and a short sequence that decode, against softmax over all that each row sees."""
    pages = 64
    spans = (Span(0, tuple(range(1, 19)), 262, 7, True), Span(1, tuple(range(30, 63)), 515, 1, True), Span(2, (63,), 0, 1, True))
    batch = Batch(np.zeros(9, np.int64), spans)
    planned = plan(batch, tile_rows(heads // kv_heads) // (heads // kv_heads))
    seen = views(torch.from_numpy(planned.numbers).to(DEVICE), planned.shapes)
    pool = empty_pool(kv_heads, pages, dim)
    queries = normal(9, heads, dim) * 0.5
    wanted, row = torch.empty(9, heads * dim, dtype=torch.float64, device=DEVICE), 0
    for span in spans:
        end = span.start + span.length
        slots = torch.tensor([span.pages[at // 16] * 16 + at % 16 for at in range(end)], device=DEVICE)
        for number, scales in enumerate((pool.key_scales, pool.value_scales)):
            scales[:, slots] = torch.rand(kv_heads, end, generator=torch.Generator().manual_seed(number)).to(DEVICE) / 50 + 0.001
        keys = (pool.keys[:, slots].double() * pool.key_scales[:, slots, None]).repeat_interleave(heads // kv_heads, dim=0)
        values = (pool.values[:, slots].double() * pool.value_scales[:, slots, None]).repeat_interleave(heads // kv_heads, dim=0)
        for position in range(span.start, end):
            weights = torch.softmax((keys[:, : position + 1] @ queries[row].double()[..., None])[..., 0], dim=1)
            mixed = (weights[:, None] @ values[:, : position + 1])[:, 0]
            wanted[row] = (mixed @ rotation(dim).double()).flatten()
            row += 1
    got = attend(queries, pool, seen.tiles, seen.page_table, planned.partitions, rotation(dim), dtype)
    limit = EXACT if dtype == torch.float32 else 1e-2
    yield Check(f"attention, {heads} heads of {dim} on {kv_heads}, {dtype}", error(got, wanted), limit)


def sampling(rows: int = 12, vocabulary: int = 500) -> Iterator[Check]:
    generator = np.random.default_rng(4)
    logits = (generator.normal(size=(rows, vocabulary)) * 3).astype(np.float32)
    logits[:, ::5] = np.round(logits[:, ::5])  # equals, and zeros of both signs
    keys = sampling_keys(rows, generator)
    got = sample(*(torch.from_numpy(array).to(DEVICE) for array in (logits, *keys))).cpu().numpy()
    wanted = [drawn(row, *key) for row, *key in zip(logits, *keys, strict=True)]
    yield Check("tokens that are not those of the emulation", int((got != np.array(wanted)).sum()), 0)


def sampling_keys(rows: int, generator: np.random.Generator) -> tuple[np.ndarray, ...]:
    """Temperatures, top-k, seeds, sample indices and positions, as `sample` takes them."""
    temperatures = np.resize([0.0, 0.7, 1.3], rows)
    top_ks = np.resize([0, 1, 5, 0, 50, 3, 9999], rows).astype(np.int64)
    seeds = generator.integers(0, 2**64, rows, dtype=np.uint64).view(np.int64)
    return temperatures, top_ks, seeds, np.arange(rows) % 3, generator.integers(1, 500, rows)


def drawn(logits: np.ndarray, temperature: float, top_k: int, seed: int, sample_index: int, position: int) -> int:
    """What `engine.sampling` draws, which is not imported here for what it needs."""
    if temperature == 0:
        return int(logits.argmax())
    order = np.argsort(-logits, kind="stable")[:top_k] if top_k else np.arange(len(logits))
    weights = np.cumsum(np.exp(logits[order].astype(np.float64) / temperature - float(logits.max()) / temperature))
    key, counter = np.array([int(seed) % 2**64, sample_index], np.uint64), np.array([position, 0, 0, 0], np.uint64)
    uniform = (int(np.random.Philox(key=key, counter=counter).random_raw()) >> 11) * 2.0**-53
    return int(order[min(int(np.searchsorted(weights, uniform * weights[-1], side="right")), len(order) - 1)])


def kernels() -> Iterator[Check]:
    """All of them, in the shapes that models have."""
    yield from products()
    yield from elementwise()
    yield from writing()
    yield from writing(4, 4, 128)
    yield from attention()
    yield from attention(8, 1, 128)
    if not INTERPRETED:
        yield from attention(dtype=SHORT)
    yield from sampling()


Logits = dict[tuple[int, int], np.ndarray]  # by sequence and number of tokens that they follow


def alone(backend: CudaBackend, sequences: list[np.ndarray], decodes: int) -> Logits:
    """Each sequence by itself: but for the last `decodes` tokens in one piece, those one by one."""
    found: Logits = {}
    for number, tokens in enumerate(sequences):
        pages = tuple(range(-(-len(tokens) // 16)))
        prompt = len(tokens) - decodes
        for start, end in [(0, prompt), *((at, at + 1) for at in range(prompt, len(tokens)))]:
            rows = backend.step(Batch(tokens[start:end], (Span(number, pages, start, end - start, True),)))
            found[number, end] = rows[0].copy()
    return found


def together(
    backend: CudaBackend, sequences: list[np.ndarray], decodes: int, pages: int, generator: np.random.Generator, largest: int
) -> Logits:
    """The same sequences in one batch, in any order, cut anywhere into chunks of at most `largest`, on any pages that hold anything.

    A sequence that begins with whole pages of the first one's reads them there, once the first one has computed them.
    """
    spoil(backend)
    shuffled = [int(page) for page in generator.permutation(pages)]
    tables = [tuple(shuffled.pop() for _ in range(-(-len(tokens) // 16))) for tokens in sequences]
    done, ready = [0] * len(sequences), 0
    found: Logits = {}
    while any(done[number] < len(tokens) for number, tokens in enumerate(sequences)):
        spans, token_ids = [], []
        for number in generator.permutation(len(sequences)).tolist():
            tokens, shared = sequences[number], common_pages(sequences[0], sequences[number]) if number else 0
            if shared and not done[number]:
                if ready < shared * 16:
                    continue
                tables[number] = tables[0][:shared] + tables[number][shared:]
                done[number] = shared * 16
            start, prompt = done[number], len(tokens) - decodes
            if start == len(tokens) or (start >= prompt and any(at < len(t) - decodes for at, t in zip(done, sequences, strict=True))):
                continue  # decode together at the end: that is the batch that graphs serve
            end = start + 1 if start >= prompt else min(prompt, start + int(generator.integers(1, largest + 1)))
            spans.append(Span(number, tables[number], start, end - start, end >= prompt))
            token_ids.append(tokens[start:end])
            done[number] = end
        rows = backend.step(Batch(np.concatenate(token_ids), tuple(spans)))
        for row, span in zip(rows, (span for span in spans if span.samples), strict=True):
            found[span.sequence_id, span.start + span.length] = row.copy()
        ready = done[0]
    return found


def common_pages(first: np.ndarray, other: np.ndarray) -> int:
    """Whole pages that both begin with; the last token is always computed."""
    most = min(len(first), len(other)) - 1
    different = np.flatnonzero(first[:most] != other[:most])
    return int(different[0] if len(different) else most) // 16


def spoil(backend: CudaBackend) -> None:
    """Leaves in the pool what another sequence might."""
    for pool in backend.pool:
        pool.keys.random_(-128, 128)
        pool.values.random_(-128, 128)
        pool.key_scales.fill_(math.nan)
        pool.value_scales.fill_(math.nan)


def differing(wanted: Logits, got: Logits) -> int:
    """Rows of logits that are missing, or are not the same bits."""
    return sum(key not in got or not np.array_equal(row, got[key]) for key, row in wanted.items())
