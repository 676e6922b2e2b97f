"""fp8 keys and values of the cpu backend: the stored numbers are those of the reference, and each is read as what e4m3 says it is."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from test_cpu_kernels import LIMIT, Sequence, Setting, error, rotated, tier

from decodefleet_agent.engine.backends import native
from decodefleet_agent.engine.backends.kv_formats import allocated, write
from decodefleet_agent.engine.backends.native import KVFormat

__all__ = ["tier"]  # a fixture
pytestmark = pytest.mark.skipif(not native.LIBRARY.exists(), reason="the native library was not built: there is no C++ compiler")
NAN = 0x7F


@pytest.fixture
def flushed() -> Iterator[None]:
    """Subnormal numbers are zero, as on the engine's threads. PyTorch's other threads do not hear of it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    yield
    torch.set_flush_denormal(False)
    torch.set_num_threads(threads)


def parts(setting: Setting, pool: np.ndarray) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """What a pool of one layer holds, as in the reference: bytes of both [kv_heads, tokens, dim], and their scales [kv_heads, tokens]."""
    heads = torch.from_numpy(pool.view(np.uint8)).view(setting.pages, setting.kv_heads, -1).transpose(0, 1)
    half = 16 * setting.dim
    keys, values, scales = heads[..., :half], heads[..., half : 2 * half], heads[..., 2 * half :].contiguous().view(torch.float32)
    keys = keys.unflatten(-1, (setting.dim, 16)).transpose(-1, -2)
    return (
        keys.flatten(1, 2), values.unflatten(-1, (16, setting.dim)).flatten(1, 2), scales[..., :16].flatten(1), scales[..., 16:].flatten(1)
    )  # fmt: skip


def heads_of_all_kinds(rows: int, heads: int, dim: int, generator: np.random.Generator) -> torch.Tensor:
    """[rows, heads, dim], as they will be after the rotation: normal, all zero, with outliers, halfway between two numbers (the largest
    being 448), and so small that 448 over them is infinite."""
    x = torch.from_numpy(generator.normal(size=(rows, heads, dim)).astype(np.float32))
    x *= torch.from_numpy(10.0 ** generator.uniform(-12, 12, (rows, heads, 1)).astype(np.float32))
    x[1::5, :, 3] *= 300
    steps = torch.from_numpy(generator.integers(-32, 33, (rows, heads, dim)).astype(np.float32)) / 2
    halfway = (steps * torch.from_numpy(2.0 ** generator.integers(-9, 5, (rows, heads, dim))).float()).clamp(-440, 440)
    halfway[..., 0] = 448
    x[2::5] = halfway[2::5]
    x[3::5] = 0
    x[4::5] *= 1e-36 / x[4::5].abs().amax(dim=-1, keepdim=True)
    return rotated(x, 64)


@pytest.mark.parametrize("dim", [64, 128])
def test_the_stored_numbers_are_those_of_the_reference(tier: bytes, dim: int, flushed: None) -> None:
    setting = Setting(4, 2, dim, KVFormat.fp8, pages=20)
    rows = 300
    generator = np.random.default_rng(dim)
    qkv = heads_of_all_kinds(rows, 8, dim, generator)
    pool = np.zeros(setting.pages * setting.page_bytes // 4, np.float32)
    empty = torch.zeros(0, 2, dim)
    sequence = Sequence(list(range(setting.pages)), empty, empty, empty[..., 0])
    setting.native(tier, 1, pool, [(sequence, rows)], qkv.flatten(1).numpy())
    keys, values, key_scales, value_scales = (part[:, :rows] for part in parts(setting, pool))
    at = torch.arange(rows)
    for numbers, scales, x in ((keys, key_scales, setting.turned(qkv[:, 4:6], 0)), (values, value_scales, qkv[:, 6:])):
        wanted = allocated("fp8", 1, 2, setting.pages, dim).layer(0)
        write(wanted, at // 16, at % 16, rotated(x, 64))
        assert wanted.scales is not None
        assert torch.equal(numbers, wanted.numbers.view(torch.uint8).flatten(1, 2)[:, :rows])
        assert torch.equal(scales, wanted.scales.flatten(1)[:, :rows])
        assert not (numbers & NAN == NAN).any() and torch.isfinite(scales).all()
        assert numbers.unique().numel() > 150


def test_every_byte_is_read_as_what_it_stands_for(tier: bytes) -> None:
    """256 sequences of two tokens: the first has one byte as its value, the second nothing; queries that are zero mix them in equal parts.
    A rotated value of one dimension is an eighth of it in all. The two bytes of NaN, which are never written, are read as 480."""
    setting = Setting(1, 1, 64, KVFormat.fp8, pages=256)
    pool = np.zeros((256, setting.page_bytes), np.uint8)
    pool[:, 16 * 64] = np.arange(256)
    pool[:, -128:].view(np.float32)[:, [0, 16]] = 1
    first = torch.zeros(1, 1, 64)
    spans = [(Sequence([page], first, first, first[..., 0]), 1) for page in range(256)]
    wanted = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    wanted[[NAN, NAN | 0x80]] = torch.tensor([480.0, -480.0])
    got = torch.from_numpy(setting.native(tier, 1, pool, spans, np.zeros((256, 3 * 64), np.float32)))
    assert torch.equal(got, (wanted / 16)[:, None].expand(256, 64))


def test_keys_that_are_all_zero_are_attended_to_alike(tier: bytes) -> None:
    setting = Setting(1, 1, 64, KVFormat.fp8, pages=4)
    q, k, v = torch.randn(3, 40, 64, generator=torch.Generator().manual_seed(0))
    k[:] = 0
    pool = np.full(setting.pages * setting.page_bytes // 4, np.nan, np.float32)
    empty = torch.zeros(0, 1, 64)
    got = setting.native(tier, 1, pool, [(Sequence([2, 0, 1], empty, empty, empty[..., 0]), 40)], torch.cat([q, k, v], dim=1).numpy())
    mean = setting.stored(v).cumsum(0) / torch.arange(1, 41)[:, None]
    assert error(got, rotated(mean, 64)) <= LIMIT
