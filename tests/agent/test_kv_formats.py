"""Stored keys and values of the reference backend: what is left of a number, what it takes, and what that costs a model's logits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from test_cpu_kernels import int8
from test_cpu_kernels import rotated as rotated_natively
from transformers import AutoModelForCausalLM, LlamaConfig

from decodefleet_agent.engine.backends.kv_formats import DTYPES, allocated, read, rotated, write
from decodefleet_agent.engine.backends.reference import ReferenceBackend
from decodefleet_agent.engine.batch import Batch, Span
from decodefleet_agent.engine.weights import load

ROWS = 40


def numbers(head_dim: int, seed: int = 0) -> torch.Tensor:
    """[rows, 3 heads, head_dim], one of whose dimensions is large, as keys have it; the first row is all zero."""
    x = torch.randn(ROWS, 3, head_dim, generator=torch.Generator().manual_seed(seed))
    x[:, :, 5] *= 20
    x[0] = 0
    return x


def kept(x: torch.Tensor, kv_format: str) -> torch.Tensor:
    """What is read of x after it was written."""
    pool = allocated(kv_format, 2, x.shape[1], 4, x.shape[2])
    at = torch.arange(len(x)) + 3
    write(pool.layer(1), at // 16, at % 16, x)
    assert not pool.layer(0).numbers.float().any()
    return read(pool.layer(1), torch.tensor([0, 1, 2])).flatten(1, 2)[:, 3 : 3 + len(x)].transpose(0, 1)


def test_fp32_is_stored_as_it_is() -> None:
    x = numbers(64)
    assert torch.equal(rotated(x, "fp32"), x) and torch.equal(kept(x, "fp32"), x)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_int8_is_what_the_native_backend_stores(head_dim: int) -> None:
    x = numbers(head_dim)
    assert torch.equal(rotated(x, "int8"), rotated_natively(x, 64))
    assert torch.equal(kept(rotated(x, "int8"), "int8"), int8(rotated_natively(x, 64), head_dim).float())


@pytest.mark.parametrize("head_dim", [12, 16, 48, 64, 80, 128])
def test_the_rotation_is_its_own_inverse_and_keeps_angles(head_dim: int) -> None:
    x, y = numbers(head_dim), numbers(head_dim, seed=1)
    turned = rotated(x, "fp8")
    assert torch.allclose(rotated(turned, "fp8"), x, atol=1e-5)
    assert torch.allclose((turned * rotated(y, "fp8")).sum(-1), (x * y).sum(-1), rtol=1e-4, atol=1e-3)
    assert turned.abs().amax(-1)[1:].mean() < x.abs().amax(-1)[1:].mean()
    assert torch.equal(rotated(x[7:8], "fp8"), turned[7:8])


@pytest.mark.parametrize(("kv_format", "relative", "of_largest"), [("int8", 0, 0.5 / 127), ("fp8", 2**-4, 2**-10 / 448)])
def test_no_number_moves_further_than_its_format_rounds(kv_format: str, relative: float, of_largest: float) -> None:
    x = numbers(64)
    largest = x.abs().amax(-1, keepdim=True)
    got = kept(x, kv_format)
    assert ((got - x).abs() <= 1.00001 * (relative * x.abs() + of_largest * largest)).all()
    assert torch.allclose(got.abs().amax(-1, keepdim=True), largest, rtol=1e-6)


def tiny(path: Path, kv_format: str, head_dim: int = 64) -> ReferenceBackend:
    shape = {"vocab_size": 99, "hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 2, "head_dim": head_dim}
    torch.manual_seed(3)
    heads = {"num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 128}
    config = LlamaConfig(**shape, **heads, initializer_range=0.1)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(path)
    backend = ReferenceBackend(kv_format=kv_format)
    backend.prepare(load(path), 128, lambda done, text: None)
    backend.allocate(8)
    return backend


@pytest.mark.parametrize("head_dim", [16, 64, 128])
@pytest.mark.parametrize(("kv_format", "most"), [("int8", 0.02), ("fp8", 0.06)])
def test_logits_stay_close_to_those_of_fp32(kv_format: str, most: float, head_dim: int, tmp_path: Path) -> None:
    tokens = np.random.default_rng(2).integers(0, 99, 100)
    batch = Batch(tokens, tuple(Span(0, tuple(range(7)), at, 1, samples=True) for at in range(100)))
    wanted, got = (tiny(tmp_path, form, head_dim).step(batch).copy() for form in ("fp32", kv_format))
    error = np.linalg.norm(got - wanted) / np.linalg.norm(wanted)
    assert 0 < error <= most  # an error of structure gives 1


@pytest.mark.parametrize("kv_format", DTYPES)
def test_pages_are_as_large_as_the_backend_says(kv_format: str, tmp_path: Path) -> None:
    backend = tiny(tmp_path, kv_format)
    parts = [part for pool in (backend._keys, backend._values) for part in (pool.numbers, pool.scales) if part is not None]
    assert sum(part.nbytes for part in parts) == 8 * backend.page_bytes(backend._config)
    if kv_format != "fp32":
        assert backend.page_bytes(backend._config) <= 0.3 * ReferenceBackend().page_bytes(backend._config)
