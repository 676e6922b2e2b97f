"""Each native kernel against a PyTorch emulation of its quantisation, and all instruction-set tiers against each other, bit for bit."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from decodefleet_agent.engine.backends import native
from decodefleet_agent.engine.backends.native import Format, KVFormat, address
from decodefleet_agent.engine.backends.packing import Arena, Packed, pack_blocks, pack_rotated, rotation_width
from decodefleet_agent.engine.kv_pool import GIVEN_BACK
from decodefleet_agent.engine.sparsity import Window
from decodefleet_agent.engine.weights import Blocks

pytestmark = pytest.mark.skipif(not native.LIBRARY.exists(), reason="the native library was not built: there is no C++ compiler")
TIERS = ("portable", "avx2", "avx512", "amx")
LIMIT = 1e-5
PARTITION = 256


def tiers() -> list[bytes]:
    """Those of this processor, `portable` among them: for tests whose emulation takes longer than all of them."""
    return [name.encode() for name in TIERS if native.tier(name) is not None]


@pytest.fixture(params=TIERS)
def tier(request: pytest.FixtureRequest) -> bytes:
    if native.tier(request.param) is None:
        pytest.skip(f"this processor has no {request.param}")
    return request.param.encode()


def error(got: np.ndarray, wanted: torch.Tensor) -> float:
    """Largest difference, relative to the largest value."""
    return float((torch.from_numpy(got).double() - wanted).abs().max() / wanted.abs().max())


def rotated(x: torch.Tensor, width: int) -> torch.Tensor:
    """The Hadamard transform in the kernels' order of additions."""
    step = 1
    while step < width:
        pairs = x.unflatten(-1, (-1, 2, step))
        low, high = pairs[..., 0, :], pairs[..., 1, :]
        x = torch.stack([low + high, low - high], dim=-2).flatten(-3)
        step *= 2
    return x * torch.tensor(width**-0.5, dtype=torch.float32)


def int8(x: torch.Tensor, size: int) -> torch.Tensor:
    """What is left of fp32 values after int8 with one scale for each `size` of them."""
    groups = x.unflatten(-1, (-1, size))
    top = groups.abs().amax(dim=-1, keepdim=True)
    inverse = torch.where(top > 0, torch.div(torch.tensor(127.0), top), torch.zeros(1))  # `127 / top` rounds twice
    values = torch.round(groups * inverse)
    return (values.double() * (top / 127).double()).flatten(-2)


def fp8(x: torch.Tensor) -> torch.Tensor:
    """What is left of fp32 values after e4m3 with one scale for the last dimension, the largest being 448."""
    top = x.abs().amax(dim=-1, keepdim=True)
    inverse = torch.where(top > 0, torch.div(torch.tensor(448.0), top), torch.zeros(1))
    numbers = (x * inverse).clamp(-448, 448).to(torch.float8_e4m3fn)
    return numbers.double() * (top / 448).double()


def random_blocks(form: str, outputs: int, inputs: int, generator: np.random.Generator) -> tuple[Blocks, torch.Tensor]:
    """Blocks, and the matrix that they stand for."""
    import gguf

    fields = 1 + (form == "Q4_1")
    size = 32 if form == "Q8_0" else 16
    blocks = np.zeros((outputs, inputs // 32, 2 * fields + size), np.uint8)
    blocks[..., : 2 * fields] = generator.normal(size=(outputs, inputs // 32, fields)).astype(np.float16).view(np.uint8)
    blocks[..., 2 * fields :] = generator.integers(0, 256, (outputs, inputs // 32, size))
    rows = blocks.reshape(outputs, -1)
    return Blocks(form, rows), torch.from_numpy(gguf.dequantize(rows, gguf.GGMLQuantizationType[form]))


def random_matrix(form: Format, outputs: int, inputs: int, bias: bool = False, seed: int = 0) -> tuple[Packed, torch.Tensor]:
    """Packed, and what it stands for (of rotated ones: as rotated)."""
    generator = np.random.default_rng(seed)
    offsets = generator.normal(size=outputs).astype(np.float32) if bias else None
    if form != Format.INT8_ROTATED:
        blocks, matrix = random_blocks(form.name, outputs, inputs, generator)
        return pack_blocks(blocks, offsets, Arena()), matrix
    weight = torch.from_numpy(generator.normal(size=(outputs, inputs)).astype(np.float32))
    packed = pack_rotated(weight, offsets, Arena())
    assert packed.output_scale is not None
    values = packed.data.view(np.int8).reshape(-1, inputs // 32, 8, 16, 4).transpose(0, 3, 1, 2, 4).reshape(-1, inputs)[:outputs]
    matrix = torch.from_numpy(values * packed.output_scale[:outputs, None])
    assert (matrix - rotated(weight, rotation_width(inputs))).abs().max() < 0.03
    return packed, matrix


def linear(tier: bytes, packed: Packed, x: np.ndarray) -> np.ndarray:
    out = np.full((len(x), packed.linear.outputs), np.nan, np.float32)
    native.library().df_linear_rows(tier, ctypes.byref(packed.linear), address(x), len(x), address(out))
    return out


def random_rows(rows: int, inputs: int) -> np.ndarray:
    """With a few large values, as activations have, a row of zeros, and a tiny one."""
    generator = np.random.default_rng(rows)
    x = generator.normal(size=(rows, inputs)) * np.where(generator.random((rows, inputs)) < 0.01, 30, 1)
    if rows > 2:
        x[1], x[2] = 0, x[2] * 1e-30
    return x.astype(np.float32)


@pytest.mark.parametrize("form", Format)
@pytest.mark.parametrize(
    ("outputs", "inputs", "bias"), [(8, 32, False), (96, 576, True), (211, 96, True), (33, 1536, False), (5, 160, True)]
)
def test_linear(tier: bytes, form: Format, outputs: int, inputs: int, bias: bool) -> None:
    packed, matrix = random_matrix(form, outputs, inputs, bias)
    offsets = 0 if packed.bias is None else torch.from_numpy(packed.bias).double()
    x = random_rows(70, inputs)
    seen = torch.from_numpy(x) if form != Format.INT8_ROTATED else rotated(torch.from_numpy(x), rotation_width(inputs))
    got = linear(tier, packed, x)
    assert error(got, int8(seen, 32) @ matrix.double().T + offsets) <= LIMIT
    some = range(1, 9) if tier == b"portable" else (*range(1, 28), 32, 33, 41, 42, 43, 63, 64, 65, 69)
    for rows in some:  # no row's bits depend on the others
        assert np.array_equal(linear(tier, packed, x[:rows]), got[:rows])
    assert np.array_equal(linear(TIERS[0].encode(), packed, x), got)


@pytest.mark.parametrize("form", [Format.Q4_0, Format.Q4_1, Format.Q8_0, Format.INT8_ROTATED])
def test_extreme_weights_do_not_saturate(tier: bytes, form: Format) -> None:
    packed, _ = random_matrix(form, 16, 64)
    size, value = (256, 0xFF) if form in (Format.Q4_0, Format.Q4_1) else (512, 0x80)
    packed.data[..., -size:] = value
    x = np.where(np.arange(64) % 3, 5.0, -5.0).astype(np.float32)[None].repeat(4, axis=0)
    x[1:3] = 5.0
    assert np.array_equal(linear(TIERS[0].encode(), packed, x), linear(tier, packed, x))


@pytest.mark.parametrize("form", Format)
def test_embedding(tier: bytes, form: Format) -> None:
    packed, matrix = random_matrix(form, 37, 160)
    wanted = matrix if form != Format.INT8_ROTATED else rotated(matrix, 32)
    for token in range(37):
        out = np.empty(160, np.float32)
        native.library().df_embed(tier, ctypes.byref(packed.linear), token, address(out))
        assert error(out, wanted[token].double()) <= LIMIT


@pytest.mark.parametrize("size", [32, 576, 1536])
def test_norm_and_swiglu(tier: bytes, size: int) -> None:
    generator = np.random.default_rng(size)
    x, weight = generator.normal(size=(2, size)).astype(np.float32)
    gate = np.concatenate([generator.normal(size=size - 4) * 10, [-1e4, 100, -100, 1e4]]).astype(np.float32)
    functions = {
        "df_rms_norm": ((x, weight), (size, 1e-5)),
        "df_swiglu": ((gate, x), (size,)),
    }
    wide, factors = torch.from_numpy(x).double(), torch.from_numpy(weight).double()
    wanted = {
        "df_rms_norm": wide * torch.rsqrt((wide * wide).mean() + 1e-5) * factors,
        "df_swiglu": torch.nn.functional.silu(torch.from_numpy(gate).double()) * wide,
    }
    for name, (arrays, numbers) in functions.items():
        results = []
        for one in (tier, TIERS[0].encode()):
            out = np.empty(size, np.float32)
            getattr(native.library(), name)(one, *map(address, arrays), *numbers, address(out))
            results.append(out)
        assert np.array_equal(*results)
        relative = (torch.from_numpy(results[0]).double() - wanted[name]).abs() / wanted[name].abs().clamp(min=1e-28)
        assert relative.max() <= LIMIT


def whole_weights(weights: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax weights [..., keys], rounded: a partition's weights times the values' scales are whole numbers up to 16383. And by how much
    fp32 may be off, where a weight lies so close to the middle of two whole numbers that it may round to the other."""
    rounded, doubt = [], []
    for part, scale in zip(weights.split(PARTITION, dim=-1), scales.split(PARTITION, dim=-1), strict=True):
        unit = (part * scale).amax(dim=-1, keepdim=True) / 16383
        exact = (part * scale / unit).nan_to_num(0)
        near = (exact - exact.floor() - 0.5).abs() < 0.01
        rounded.append(torch.round(exact) * unit / scale)
        doubt.append(near * unit / scale)
    return torch.cat(rounded, dim=-1), torch.cat(doubt, dim=-1)


def value_scales(values: torch.Tensor) -> torch.Tensor:
    return rotated(values, 64).abs().amax(dim=-1).double() / 127


def close(got: np.ndarray, emulated: list[tuple[torch.Tensor, torch.Tensor]]) -> bool:
    """Whether these are the emulated values, each with how far fp32 may be off it, to within LIMIT of the largest."""
    wanted, off = (torch.cat(parts) for parts in zip(*emulated, strict=True))
    return bool(((torch.from_numpy(got).double() - wanted).abs() <= LIMIT * wanted.abs().max() + off).all())


@dataclass
class Sequence:
    """Tokens in the pool, and what attention should read of them: [tokens, kv_heads, dim] float64."""

    pages: list[int]
    keys: torch.Tensor
    values: torch.Tensor
    value_scales: torch.Tensor  # [tokens, kv_heads]


@dataclass
class Setting:
    heads: int
    kv_heads: int
    dim: int
    kv_format: KVFormat
    context: int = 1100
    pages: int = 160
    policy: native.SparsityPolicy = native.SparsityPolicy.None_
    sinks: int = 0
    window: int = 0

    def __post_init__(self) -> None:
        angles = np.outer(np.arange(self.context), 1e4 ** -(np.arange(self.dim // 2) / (self.dim // 2)))
        self.cosine, self.sine = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        self.model = native.Model(
            cosine=address(self.cosine), sine=address(self.sine),
            heads=self.heads, kv_heads=self.kv_heads, head_dim=self.dim, kv_format=self.kv_format,
            sparsity=self.policy, sinks=self.sinks, window=self.window,
        )  # fmt: skip
        self.page_bytes = native.library().df_page_bytes(ctypes.byref(self.model))

    def give_back(self, sequences: list[Sequence]) -> None:
        if self.policy == native.SparsityPolicy.SlidingWindow:
            for sequence in sequences:
                for page in Window(self.sinks, self.window).unseen(len(sequence.keys)):
                    sequence.pages[page] = GIVEN_BACK

    def turned(self, x: torch.Tensor, start: int) -> torch.Tensor:
        """Rotary positions on [rows, heads, dim]."""
        low, high = x.chunk(2, dim=-1)
        cosine, sine = (torch.from_numpy(table)[start : start + len(x)][:, None] for table in (self.cosine, self.sine))
        return torch.cat([low * cosine - high * sine, high * cosine + low * sine], dim=-1)

    def rotated(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.kv_format == KVFormat.fp32 else rotated(x, 64)

    def stored(self, x: torch.Tensor) -> torch.Tensor:
        kept = {KVFormat.fp32: torch.Tensor.double, KVFormat.int8: lambda x: int8(x, self.dim), KVFormat.fp8: fp8}
        return kept[self.kv_format](self.rotated(x))

    def attention(self, sequence: Sequence, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[rows, heads * dim]: the emulation, which adds the rows to the sequence; and how far fp32 may be off it."""
        start = len(sequence.keys)
        q, k, v = qkv.unflatten(-1, (-1, self.dim)).split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        sequence.keys = torch.cat([sequence.keys, self.stored(self.turned(k, start))])
        sequence.values = torch.cat([sequence.values, self.stored(v)])
        sequence.value_scales = torch.cat([sequence.value_scales, value_scales(v)])
        query = self.stored(self.turned(q, start)) if self.kv_format == KVFormat.int8 else self.rotated(self.turned(q, start)).double()
        keys, values = (x.repeat_interleave(self.heads // self.kv_heads, dim=1) for x in (sequence.keys, sequence.values))
        scores = torch.einsum("qhd,khd->hqk", query, keys) / self.dim**0.5
        at, rows = torch.arange(len(sequence.keys)), torch.arange(start, len(sequence.keys))[:, None]
        hidden = at > rows
        if self.policy == native.SparsityPolicy.SlidingWindow:
            hidden |= (at >= self.sinks) & (at <= rows - self.window)
        weights = torch.softmax(scores.masked_fill(hidden, -torch.inf), dim=-1)
        doubt = torch.zeros_like(weights)
        if self.kv_format == KVFormat.int8:
            weights, doubt = whole_weights(weights, sequence.value_scales.repeat_interleave(self.heads // self.kv_heads, dim=1).T[:, None])
        mixed = torch.einsum("hqk,khd->qhd", weights, values)
        off = torch.einsum("hqk,kh->qh", doubt, values.norm(dim=-1))[..., None].expand_as(mixed)  # whose size no rotation changes
        return self.rotated(mixed).flatten(1), off.flatten(1)

    def native(self, tier: bytes, threads: int, pool: np.ndarray, spans: list[tuple[Sequence, int]], qkv: np.ndarray) -> np.ndarray:
        starts = np.array([len(sequence.keys) for sequence, _ in spans], np.int32)
        lengths = np.array([length for _, length in spans], np.int32)
        offsets = np.cumsum([0, *(len(sequence.pages) for sequence, _ in spans)], dtype=np.int32)
        pages = np.array([page for sequence, _ in spans for page in sequence.pages], np.int32)
        batch = native.Batch(
            span_start=address(starts), span_length=address(lengths), page_offset=address(offsets), pages=address(pages),
            rows=len(qkv), spans=len(spans),
        )  # fmt: skip
        out = np.full((len(qkv), self.heads * self.dim), np.nan, np.float32)
        described = ctypes.byref(self.model), ctypes.byref(batch)
        native.library().df_attention(tier, *described, address(qkv), address(pool), self.pages, threads, address(out))
        return out


@pytest.mark.parametrize("kv_format", KVFormat)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (4, 4, 64), (8, 2, 128), (7, 1, 64)])
def test_attention(kv_format: KVFormat, heads: int, kv_heads: int, dim: int) -> None:
    ragged_batches(Setting(heads, kv_heads, dim, kv_format))


@pytest.mark.parametrize("kv_format", KVFormat)
@pytest.mark.parametrize(("sinks", "window"), [(0, 16), (4, 37), (16, 256), (300, 100), (5, 700), (16, 2000)])
def test_sliding_window(kv_format: KVFormat, sinks: int, window: int) -> None:
    for heads, kv_heads in ((9, 3), (4, 2)):
        policy = native.SparsityPolicy.SlidingWindow
        ragged_batches(Setting(heads, kv_heads, 64, kv_format, policy=policy, sinks=sinks, window=window))


def ragged_batches(setting: Setting) -> None:
    """Scattered pages whose memory holds NaN: prefill, then decode and chunks beside each other. Pages outside a window are given back."""
    heads, kv_heads, dim = setting.heads, setting.kv_heads, setting.dim
    size = setting.pages * setting.page_bytes // 4
    pools = {(one, threads): np.full(size, np.nan, np.float32) for one in tiers() for threads in (1, 2)}
    generator = np.random.default_rng(heads)
    free = generator.permutation(setting.pages).tolist()
    nothing = torch.zeros(0, kv_heads, dim, dtype=torch.float64)
    sequences = [Sequence([free.pop() for _ in range(count)], nothing, nothing, nothing[..., 0]) for count in (66, 30, 2, 20)]
    for lengths in ((255, 300, 1, 31), (1, 1, 1, 1), (40, 0, 5, 230), (513, 0, 0, 0), (1, 0, 0, 0)):
        spans = [(sequence, length) for sequence, length in zip(sequences, lengths, strict=True) if length]
        qkv = generator.normal(size=(sum(lengths), (heads + 2 * kv_heads) * dim)).astype(np.float32)
        got = [setting.native(one, threads, pool, spans, qkv) for (one, threads), pool in pools.items()]
        parts = torch.from_numpy(qkv).split([length for _, length in spans])
        emulated = [setting.attention(sequence, part) for (sequence, _), part in zip(spans, parts, strict=True)]
        assert close(got[0], emulated)
        for other in got[1:]:
            assert np.array_equal(other, got[0])
        setting.give_back(sequences)


@pytest.mark.parametrize("kv_format", KVFormat)
def test_sequences_that_share_pages_have_the_bits_of_each_alone(tier: bytes, kv_format: KVFormat) -> None:
    """18 share two partitions, more than a tile holds, two more only the first of these and a part of the second, and one none."""
    setting = Setting(9, 3, 64, kv_format)
    generator = np.random.default_rng(1)
    pool = np.full(setting.pages * setting.page_bytes // 4, np.nan, np.float32)
    free = generator.permutation(setting.pages).tolist()
    shared = [free.pop() for _ in range(32)]
    pages = [[*shared, free.pop()] for _ in range(18)] + [[*shared[:20], *(free.pop() for _ in range(13))] for _ in range(2)]
    pages.append([free.pop() for _ in range(33)])

    def at(number: int, length: int) -> Sequence:
        return Sequence(pages[number], torch.zeros(length, 1), torch.zeros(0), torch.zeros(0))

    def rows(count: int) -> np.ndarray:
        return generator.normal(size=(count, 15 * 64)).astype(np.float32)

    for number, start in [(0, 0), *((number, 512) for number in range(1, 18)), (18, 320), (19, 320), (20, 0)]:
        setting.native(tier, 1, pool, [(at(number, start), 512 + number % 7 - start or 1)], rows(512 + number % 7 - start or 1))
    qkv = rows(len(pages))
    spans = [(at(number, 512 + number % 7), 1) for number in range(len(pages))]
    alone = np.concatenate([setting.native(tier, 1, pool, [span], qkv[i : i + 1]) for i, span in enumerate(spans)])
    assert np.isfinite(alone).all()
    for threads in (1, 2):
        for some in (range(len(pages)), (3, 9), (5, 18, 20), (18, 19)):
            got = setting.native(tier, threads, pool, [spans[i] for i in some], qkv[list(some)])
            assert np.array_equal(got, alone[list(some)])


@pytest.mark.parametrize("kv_format", KVFormat)
def test_a_row_reads_what_another_span_of_its_sequence_writes_in_the_same_step(tier: bytes, kv_format: KVFormat) -> None:
    setting = Setting(9, 3, 64, kv_format)
    generator = np.random.default_rng(2)
    prompt, qkv = (generator.normal(size=(count, 15 * 64)).astype(np.float32) for count in (40, 12))
    orders, got = (np.arange(12), np.arange(12)[::-1]), []
    for order in orders:
        pool = np.full(setting.pages * setting.page_bytes // 4, np.nan, np.float32)

        def at(length: int) -> Sequence:
            return Sequence([7, 3, 5, 2], torch.zeros(length, 1), torch.zeros(0), torch.zeros(0))

        setting.native(tier, 1, pool, [(at(0), 40)], prompt)
        got.append(setting.native(tier, 1, pool, [(at(40 + i), 1) for i in order], qkv[order])[np.argsort(order)])
    assert np.isfinite(got[0]).all()
    assert np.array_equal(*got)


def test_pages_take_less_than_a_third_of_fp32() -> None:
    sizes = {kv_format: Setting(9, 3, 64, kv_format).page_bytes for kv_format in KVFormat}
    assert sizes[KVFormat.fp32] == 3 * 16 * 2 * 64 * 4
    assert sizes[KVFormat.int8] == sizes[KVFormat.fp8] == 3 * 16 * 136
