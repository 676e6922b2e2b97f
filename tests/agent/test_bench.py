"""The benchmark end to end: a small random model through this engine and transformers, and load on a real agent."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM

BENCH = [sys.executable, "-m", "decodefleet_operator.cli", "bench"]
WORDS = ["river", "stone", "over", "under", "the", "a", "quick", "slow", "bridge", "water", "light", "and", "runs", "falls", "holds"]


@pytest.fixture(scope="module")
def prose(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text of 4,000 words."""
    source = random.Random(0)
    path = tmp_path_factory.mktemp("prose") / "prose.txt"
    path.write_text(" ".join(source.choice(WORDS) for _ in range(4000)))
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, prose: Path) -> Path:
    """A random model of two layers, with a tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train([str(prose)], trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, show_progress=False))
    tokenizer.save(str(folder / "tokenizer.json"))
    torch.manual_seed(0)
    shape: dict[str, Any] = {"vocab_size": 320, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2}
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
    LlamaForCausalLM(LlamaConfig(**shape, **heads, bos_token_id=None, eos_token_id=None)).save_pretrained(folder)
    return folder


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*BENCH, *arguments], capture_output=True, text=True, timeout=280, env={**os.environ, "NO_COLOR": "1"})


def test_engines_side_by_side(model: Path, prose: Path, tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    done = bench(
        "--model", f"file://{model}", "--peers", "transformers:fp32,llama.cpp:Q8_0", "--batch", "1,3", "--context", "500",
        "--tokens", "6", "--rounds", "2", "--threads", "1", "--perplexity-tokens", "700", "--text", str(prose), "--json", str(figures),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(figures.read_text())
    assert [(r["engine"], r["batch"], r["context"]) for r in found["results"]] == [
        (engine, batch, 250) for batch in (1, 3) for engine in ("decodefleet", "transformers")
    ], "the longest prompt leaves room for its output in the model's context of 256"
    for result in found["results"]:
        assert result["tokens_per_second_low"] <= result["tokens_per_second"] <= result["tokens_per_second_high"]
        slow, fast = (result["batch"] / result[f"tokens_per_second_{end}"] for end in ("low", "high"))
        assert fast * 0.999 <= result["time_per_output_token"] <= slow * 1.001
        assert result["time_to_first_token"] > 0 and result["peak_memory"] > 50 * 2**20 and result["error"] is None
    ours, theirs = (r["perplexity"] for r in found["results"][:2])
    assert ours == pytest.approx(theirs, rel=1e-3), "one model in fp32 scores one text alike, whoever runs it"
    assert found["absent"] == [{"engine": "llama.cpp", "how_to_get": "give --model a GGUF file, the only kind it reads"}]
    assert "batch 3, context 250" in done.stdout and "vs best" in done.stdout
    assert "round 2" in done.stderr


def test_what_cannot_be_measured_says_what_to_change(model: Path, prose: Path, tmp_path: Path) -> None:
    uri = f"file://{model}"
    short = tmp_path / "short.txt"
    short.write_text("the river falls")
    for arguments, says in [
        (["--text", str(short)], "give a longer one with --text FILE"),
        (["--text", str(prose), "--tokens", "256"], "leaves no room for a prompt in the model's context of 256 tokens"),
        (["--text", str(prose), "--json", str(tmp_path / "none" / "x.json")], "there is no folder"),
    ]:
        done = bench("--model", uri, "--peers", "none", *arguments)
        assert done.returncode == 1 and says in done.stderr


def test_load_on_an_agent(model_agent: Any, prose: Path, tmp_path: Path) -> None:
    figures = tmp_path / "load.json"
    done = bench(
        "serve", "--target", model_agent.address("serving"), "--rate", "4", "--seconds", "2", "--seed", "3", "--arrivals", "bursty",
        "--prompt-words", "8", "--output-tokens", "3", "--ttft", "60s", "--e2e", "1ms", "--text", str(prose), "--json", str(figures),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(figures.read_text())
    assert found["sent"] == len(found["requests"]) > 2
    assert found["answered"] + found["rejected"] + found["failed"] == found["sent"] and found["answered"] > 0
    assert all(r["tokens"] == 3 and r["ttft"] <= r["e2e"] for r in found["requests"] if not r["error"])
    assert found["good"] == 0 and found["goodput"] == 0, "no request ends within a millisecond"
    assert f"answered {found['answered']}" in done.stdout and "goodput 0.00 requests/s" in done.stdout


def test_load_on_nobody(prose: Path) -> None:
    done = bench("serve", "--target", "127.0.0.1:1", "--seconds", "1", "--rate", "5", "--timeout", "2s", "--text", str(prose))
    assert done.returncode == 1 and "no fleet answers at 127.0.0.1:1" in done.stderr


QUALITY = Path(__file__).parents[2] / "tools" / "bench_quality.py"


def quality(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "NO_COLOR": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, str(QUALITY), *arguments], capture_output=True, text=True, timeout=280, env=environment)


def test_quality_of_formats(model: Path, prose: Path, tmp_path: Path) -> None:
    figures = tmp_path / "quality.json"
    pairs = ["reference:int8/reference:fp32", "reference:fp32/reference:fp32"]
    done = quality(
        "--model", f"file://{model}", "--text", str(prose), "--tokens", "600", "--pairs", ",".join(pairs), "--json", str(figures)
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stderr
    found = json.loads(figures.read_text())
    assert (found["tokens"], found["window"], found["gap"]) == (600, 256, 0.02) and [r["pair"] for r in found["pairs"]] == pairs
    int8, same = found["pairs"]
    assert (same["difference"], same["agreement"], same["clear_agreement"]) == (0, 1, 1)
    assert int8["difference"] != 0 and int8["perplexity"] == pytest.approx(same["perplexity"], rel=1e-3)
    assert done.stderr.count("perplexity") == 2, "a run that two pairs name is done once"
    assert (done.returncode == 0) == (not int8["missed"]) == ("all within their limits" in done.stdout)


def test_quality_of_no_such_run() -> None:
    done = quality("--pairs", "reference:int8/gpu:int8")
    assert done.returncode == 2 and "is no pair RUN/ORACLE; the runs are reference:fp32, " in done.stderr
