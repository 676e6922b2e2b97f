"""The cuda backend as a whole, in Triton's interpreter: the contract, the reference's logits, an engine around it, and when it serves."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

pytest.importorskip("triton", reason="Triton is not installed: it has no build for this system")
sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import cuda_checks

from decodefleet.config import AgentConfig
from decodefleet_agent.engine.backends import choice, cuda, native
from decodefleet_agent.engine.backends.choice import choose
from decodefleet_agent.engine.backends.cuda import CudaBackend
from decodefleet_agent.engine.backends.cuda_plan import padded_decode, plan, views
from decodefleet_agent.engine.backends.reference import ReferenceBackend
from decodefleet_agent.engine.batch import Batch, Span
from decodefleet_agent.engine.controllers.base import Limits
from decodefleet_agent.engine.controllers.static import static
from decodefleet_agent.engine.engine import Engine
from decodefleet_agent.engine.kv_pool import KVPool
from decodefleet_agent.engine.weights import load
from decodefleet_agent.messages import Sampling, Submit
from decodefleet_agent.model_files import ModelError

PAGES = 64
SMALL = {
    "vocab_size": 97,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 1,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "max_position_embeddings": 400,
    "initializer_range": 0.2,
}


def save(path: Path, **changes: Any) -> Path:
    torch.manual_seed(1)
    config = (Qwen2Config if changes.pop("qwen", False) else LlamaConfig)(**{**SMALL, **changes})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():  # biases and norms too, which transformers starts at 0 and 1
        parameter.data += torch.randn_like(parameter) * 0.05
    model.save_pretrained(path)
    return path


def prepared(backend: Any, path: Path, pages: int = PAGES) -> Any:
    backend.prepare(load(path), 400, lambda done, text: None)
    backend.allocate(pages)
    return backend


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="module")
def backend(path: Path) -> CudaBackend:
    return prepared(CudaBackend(), path)


@pytest.fixture(scope="module")
def sequences() -> list[np.ndarray]:
    """One beyond a partition of attention, a few short ones, and one that begins as the first."""
    generator = np.random.default_rng(3)
    long, *short = (generator.integers(0, 97, size) for size in (262, 21, 6, 33))
    return [long, *short, np.concatenate([long[:256], short[0][:4]])]


@pytest.fixture(scope="module")
def by_itself(backend: CudaBackend, sequences: list[np.ndarray]) -> cuda_checks.Logits:
    return cuda_checks.alone(backend, sequences, decodes=1)


@pytest.mark.parametrize(("seed", "largest"), [(0, 400), (1, 90)])
def test_the_contract(backend: CudaBackend, sequences: list[np.ndarray], by_itself: cuda_checks.Logits, seed: int, largest: int) -> None:
    got = cuda_checks.together(backend, sequences, 1, PAGES, np.random.default_rng(seed), largest)
    assert got.keys() == by_itself.keys()
    assert cuda_checks.differing(by_itself, got) == 0


def test_the_contract_with_short_sequences_in_small_pieces(sequences: list[np.ndarray], tmp_path: Path) -> None:
    """Two layers: the second reads what the first made of every token, not of the last alone."""
    backend = prepared(CudaBackend(), save(tmp_path, num_hidden_layers=2))
    short = sequences[1:4]
    wanted = cuda_checks.alone(backend, short, decodes=2)
    got = cuda_checks.together(backend, short, 2, PAGES, np.random.default_rng(0), largest=9)
    assert cuda_checks.differing(wanted, got) == 0


def test_a_filled_up_decode_batch_gives_the_same_bits(backend: CudaBackend) -> None:
    """What a graph captures, without the graph: rows that fill up, page tables and partitions for the longest context."""
    spans = tuple(Span(number, (number,), 0, 1, True) for number in range(3))
    batch = Batch(np.array([5, 6, 7]), spans)
    wanted = backend.step(batch).copy()
    padded = padded_decode(batch, backend._scratch_page)
    assert padded is not None
    planned = plan(padded, backend._tile_tokens, backend._context_pages)
    got = backend._forward(views(torch.from_numpy(planned.numbers), planned.shapes), planned.partitions)
    assert got.shape == (4, 97)
    assert np.array_equal(got[:3].numpy(), wanted)


@pytest.mark.parametrize(
    "changes",
    [
        {"tie_word_embeddings": True, "num_hidden_layers": 2},
        {"head_dim": 128},
        {"attention_bias": True, "mlp_bias": True},
        {"qwen": True},
    ],
    ids=["tied", "heads of 128", "biases", "qwen2"],
)
def test_logits_are_close_to_the_reference(changes: dict[str, Any], tmp_path: Path) -> None:
    path = save(tmp_path, **changes)
    tokens = np.random.default_rng(2).integers(0, 97, (2, 20))
    rows = []
    for backend in (ReferenceBackend(), CudaBackend()):
        prepared(backend, path, 4)
        batches = [Batch(part, (Span(0, (3, 1, 0), at, 20, True),)) for at, part in zip((0, 20), tokens, strict=True)]
        rows.append([backend.step(batch)[0].copy() for batch in batches])
    wanted, got = map(np.stack, rows)
    assert np.linalg.norm(got - wanted) / np.linalg.norm(wanted) <= 0.06  # an error of structure gives 1


def test_an_engine_serves_from_it(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chosen as an agent chooses it; two requests together, preempted for want of pages, give what each gives alone."""
    monkeypatch.setenv(choice.VARIABLE, "cuda")
    backend = prepared(choose(config(), load(path).config, 1), path)
    assert (backend.name, backend.kv_format, backend.instructions) == ("cuda", "int8", "interpreter")
    submits = [Submit(n, [n + 1] * 14, Sampling(seed=n, temperature=float(n), max_tokens=4)) for n in range(2)]

    def run(submits: list[Submit], pages: int) -> tuple[dict[int, list[int]], int]:
        limits = Limits(max_batch=4, max_batch_tokens=64, chunk=None, batch_size_threshold=8, reserve_tokens=0)
        engine = Engine(backend, limits, KVPool(pages), 1, 32, 97, static)
        tokens: dict[int, list[int]] = {submit.sequence_id: [] for submit in submits}
        engine.handle(list(submits))
        while engine.busy:
            for output in engine.step().outputs:
                assert output.finish != "error", output.error
                tokens[output.sequence_id] += output.token_ids
        return tokens, engine.stats().preemptions

    together, preemptions = run(submits, 3)
    assert preemptions > 0
    assert {number: len(tokens) for number, tokens in together.items()} == {0: 4, 1: 4}
    for submit in submits:
        assert run([submit], PAGES)[0][submit.sequence_id] == together[submit.sequence_id]


def config(**precision: str) -> AgentConfig:
    return AgentConfig.model_validate({"modelUri": "file:///m", "engine": {"precision": precision}})


def test_its_pages_are_as_large_as_it_says(backend: CudaBackend) -> None:
    bytes_ = sum(tensor.nbytes for pool in backend.pool for tensor in vars(pool).values())
    assert bytes_ == (PAGES + 1) * backend.page_bytes(backend._config)


@pytest.mark.parametrize(
    ("precision", "changes", "says"),
    [
        ({"kvCache": "fp32"}, {}, "kvCache is fp32"),
        ({"kvCache": "fp8"}, {}, "kvCache is fp8"),
        ({}, {"head_dim": 48}, "heads of 48 .*takes 64 or 128"),
    ],
)
def test_what_it_cannot_serve_is_said(
    precision: dict[str, str], changes: dict[str, Any], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(save(tmp_path, **changes)).config
    monkeypatch.setenv(choice.VARIABLE, "cuda")
    with pytest.raises(ModelError, match=says):
        choose(config(**precision), model, 1)


def test_without_a_gpu_it_is_refused_where_it_is_asked_for(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv(choice.VARIABLE, "cuda")
    with pytest.raises(ModelError, match=r"DECODEFLEET_BACKEND is cuda, .* sees no GPU .* set it to cpu or reference"):
        choose(config(), load(path).config, 1)


def test_without_a_gpu_nothing_changes(path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.delenv(choice.VARIABLE, raising=False)
    assert choose(config(weights="fp32"), load(path).config, 1).name == "reference"
    assert not [record for record in caplog.records if "GPU" in record.getMessage()]


def test_a_gpu_that_cannot_serve_a_model_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cuda, "has_gpu", lambda: True)
    monkeypatch.delenv(choice.VARIABLE, raising=False)
    assert choose(config(), load(save(tmp_path, head_dim=48)).config, 1).name != "cuda"
    said = [record for record in caplog.records if "the GPU is not used: the model has heads of 48" in record.getMessage()]
    assert [record.levelno for record in said] == [logging.WARNING]


@pytest.mark.parametrize(("precision", "dtype"), [({}, torch.float32), ({"weights": "fp32"}, torch.float32)])
def test_a_gpu_serves_unless_told_otherwise(
    precision: dict[str, str], dtype: torch.dtype, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "has_gpu", lambda: True)
    monkeypatch.delenv(choice.VARIABLE, raising=False)
    backend = choose(config(**precision), load(path).config, 1)
    assert isinstance(backend, CudaBackend)
    assert backend._dtype == dtype
    monkeypatch.setenv(choice.VARIABLE, "reference")
    assert choose(config(), load(path).config, 1).name == "reference"
    monkeypatch.setenv(choice.VARIABLE, "cpu")
    if native.LIBRARY.exists():
        assert choose(config(), load(path).config, 1).name == "cpu"
