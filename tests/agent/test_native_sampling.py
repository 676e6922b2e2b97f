"""Native sampling against engine/sampling.py: equal tokens, except where rounding decides."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decodefleet_agent.engine import sampling as python
from decodefleet_agent.engine.backends import native
from decodefleet_agent.engine.backends.native_sampling import Draws
from decodefleet_agent.engine.sampling import NOT_FINITE, sample_rows
from decodefleet_agent.messages import Sampling

pytestmark = pytest.mark.skipif(not native.LIBRARY.exists(), reason="the native library was not built: there is no C++ compiler")
TIERS = [tier for tier in ("portable", "avx2", "avx512", "amx") if native.LIBRARY.exists() and native.tier(tier)]
CLOSE = 1e-9


@dataclass(frozen=True)
class Row:
    sampling: Sampling
    tokens: list[int]
    prompt_length: int


def natively(logits: np.ndarray, rows: list[Row], tier: str) -> list[int | str]:
    draws, found = Draws(rows), np.full(len(rows), -7, np.int32)
    logits = np.ascontiguousarray(logits, np.float32)
    native.library().df_sample_rows(tier.encode(), native.address(logits), *logits.shape, draws.address, native.address(found))
    return [token if token >= 0 else NOT_FINITE for token in found.tolist()]


def rounding_decides(logits: np.ndarray, row: Row) -> bool:
    """Whether the draw, or a truncation, is so close to a boundary that another order of additions may choose another token."""
    tokens = set()
    for factor in (1 - CLOSE, 1, 1 + CLOSE):
        for top_p in (row.sampling.top_p * (1 - CLOSE), row.sampling.top_p, min(1, row.sampling.top_p * (1 + CLOSE))):
            for min_p in (row.sampling.min_p * (1 - CLOSE), row.sampling.min_p, min(1, row.sampling.min_p * (1 + CLOSE))):
                near = replace(row, sampling=changed(row.sampling, top_p=top_p, min_p=min_p))
                with pytest.MonkeyPatch.context() as patch:
                    draw = python.uniform(row.sampling.seed, row.sampling.sample_index, len(row.tokens))
                    patch.setattr(python, "uniform", lambda *key, draw=draw, factor=factor: min(draw * factor, 1 - 2**-53))
                    tokens |= set(sample_rows(logits[None], [near]))
    return len(tokens) > 1


def changed(sampling: Sampling, **fields: object) -> Sampling:
    return Sampling(**{name: getattr(sampling, name) for name in Sampling.__struct_fields__} | fields)  # type: ignore[arg-type]


samplings = st.builds(
    Sampling,
    seed=st.integers(0, 2**64 - 1),
    sample_index=st.integers(0, 15),
    temperature=st.sampled_from([0.0, 0.0, 0.7, 1.0, 1.0, 2.0**-149, 50.0]) | st.floats(0.01, 3),
    top_k=st.sampled_from([0, 0, 1, 5, 50, 100_000]),
    top_p=st.sampled_from([1.0, 1.0, 0.9, 0.5, 1e-9]) | st.floats(0.001, 1),
    min_p=st.sampled_from([0.0, 0.0, 0.1, 1.0]) | st.floats(0, 1),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3, 2.0**-149]),
    presence_penalty=st.sampled_from([0.0, 0.0, -1.5, 2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.0, -0.3, 0.5]),
)


@settings(max_examples=300, deadline=None)
@given(
    samplings=st.lists(samplings, min_size=1, max_size=4),
    shape=st.sampled_from([1, 3, 63, 64, 65, 300, 5000]),
    spread=st.sampled_from([0.0, 0.3, 2.0, 6.0, 300.0]),
    digits=st.sampled_from([0, 1, 6]),  # few of them give ties
    prompt=st.integers(0, 30),
    seed=st.integers(0, 1000),
)
def test_tokens_are_those_of_the_plain_way(
    samplings: list[Sampling], shape: int, spread: float, digits: int, prompt: int, seed: int
) -> None:
    random = np.random.default_rng(seed)
    logits = (random.standard_normal((len(samplings), shape)) * spread).round(digits).astype(np.float32)
    rows = [Row(one, random.integers(0, shape, 40).tolist(), prompt) for one in samplings]
    together = natively(logits, rows, TIERS[0])
    for tier in TIERS[1:]:
        assert natively(logits, rows, tier) == together, "tiers differ"
    for number, row in enumerate(rows):
        alone = natively(logits[number][None], [row], TIERS[-1])[0]
        assert alone == together[number], "a row's token depends on the others"
        wanted = sample_rows(logits[number][None], [row])[0]
        assert alone == wanted or rounding_decides(logits[number], row)


def test_the_whole_vocabulary_of_the_demo_model() -> None:
    random = np.random.default_rng(2)
    logits = (random.standard_normal((24, 49152)) * 3).astype(np.float32)
    ways = itertools.product((0, 50), (1.0, 0.9, 0.999), (0.0, 0.01), (1.0, 1.2))
    rows = [
        Row(
            Sampling(seed=n, temperature=1.0, top_k=k, top_p=p, min_p=m, repetition_penalty=r), random.integers(0, 49152, 600).tolist(), 300
        )
        for n, (k, p, m, r) in enumerate(ways)
    ]
    assert natively(logits, rows, TIERS[-1]) == sample_rows(logits, rows)


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("at", [0, 63, 64, 129])
def test_what_is_not_finite_is_found_anywhere(tier: str, temperature: float, wrong: float, at: int) -> None:
    logits = np.zeros((2, 130), np.float32)
    logits[1, at] = wrong
    rows = [Row(Sampling(seed=1, temperature=temperature), [1], 1)] * 2
    assert natively(logits, rows, tier)[1] == NOT_FINITE != natively(logits, rows, tier)[0]


@given(seed=st.integers(0, 2**64 - 1), sample=st.integers(0, 2**63), position=st.integers(0, 2**40))
@settings(deadline=None)
def test_random_numbers_are_bit_for_bit_those_of_the_plain_way(seed: int, sample: int, position: int) -> None:
    assert native.library().df_uniform(seed, sample, position) == python.uniform(seed, sample, position)
