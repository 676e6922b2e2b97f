"""Sampling: the numbers are keyed, the truncations are those of the definitions, and the draws follow the distribution."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decodefleet_agent.engine.sampling import sample, token_logprob, uniform
from decodefleet_agent.messages import Sampling

LOGITS = np.log(np.array([0.5, 0.25, 0.125, 0.0625, 0.0625], np.float32))


def drawn(count: int = 400, **fields: object) -> Counter[int]:
    """Tokens drawn at `count` positions."""
    sampling = Sampling(seed=3, **{"temperature": 1.0, **fields})  # type: ignore[arg-type]
    return Counter(sample(LOGITS, sampling, [0] * position, []) for position in range(count))


def test_uniform_numbers_depend_on_their_key_alone() -> None:
    assert uniform(5, 0, 7) == uniform(5, 0, 7)
    assert len({uniform(seed, index, position) for seed in (1, 2) for index in (0, 1) for position in range(50)}) == 200
    assert uniform(2**64 - 1, 15, 8191) != uniform(2**64 - 2, 15, 8191)


def test_uniform_numbers_are_uniform() -> None:
    numbers = np.array([uniform(seed, 0, position) for seed in range(20) for position in range(200)])
    counts, _ = np.histogram(numbers, bins=10, range=(0, 1))
    assert (np.abs(counts - 400) < 100).all()  # five standard deviations
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.08


def test_uniform_is_philox_as_documented() -> None:
    generator = np.random.Generator(np.random.Philox(key=[11, 2], counter=[40, 0, 0, 0]))
    assert uniform(11, 2, 40) == generator.random()


def test_temperature_zero_takes_the_likeliest_and_the_lowest_among_equals() -> None:
    assert sample(np.array([1, 3, 3, 2], np.float32), Sampling(seed=0), [1], []) == 1


def test_draws_follow_the_distribution() -> None:
    counts = drawn(4000)
    for token, probability in enumerate([0.5, 0.25, 0.125, 0.0625, 0.0625]):
        assert abs(counts[token] / 4000 - probability) < 5 * (probability / 4000) ** 0.5


def test_a_low_temperature_sharpens() -> None:
    assert drawn(temperature=0.25)[0] > 340 > drawn()[0]


def test_top_k_keeps_k_tokens() -> None:
    assert set(drawn(top_k=2)) == {0, 1}
    assert set(drawn(top_k=4)) == {0, 1, 2, 3}  # of two equals, the lower id
    assert set(drawn(top_k=99)) == {0, 1, 2, 3, 4}


def test_top_p_keeps_the_smallest_set_that_reaches_p() -> None:
    assert set(drawn(top_p=0.5)) == {0}
    assert set(drawn(top_p=0.6)) == {0, 1}
    assert set(drawn(top_p=1e-9)) == {0}


def test_min_p_drops_what_is_less_likely_than_its_share_of_the_likeliest() -> None:
    assert set(drawn(min_p=0.3)) == {0, 1}
    assert set(drawn(min_p=1.0)) == {0}


def test_penalties() -> None:
    logits = np.array([2.0, 1.9, -1.0, -1.1], np.float32)

    def greedy(prompt: list[int], output: list[int], **fields: float) -> int:
        return sample(logits, Sampling(seed=0, **fields), prompt, output)  # type: ignore[arg-type]

    assert greedy([0], [], repetition_penalty=1.2) == 1  # the prompt counts
    assert greedy([0, 1], [], repetition_penalty=3.0) == 0
    assert greedy([0], [], presence_penalty=1.0) == 0  # the prompt does not
    assert greedy([], [0], presence_penalty=0.2) == 1
    assert greedy([], [0, 1, 1], frequency_penalty=0.2) == 0
    assert greedy([], [0, 0, 1], frequency_penalty=0.2) == 1
    assert greedy([], [0], presence_penalty=-1.0) == 0


def test_a_repetition_penalty_makes_negative_logits_smaller() -> None:
    assert sample(np.array([-1.0, -1.5], np.float32), Sampling(seed=0, repetition_penalty=2.0), [0], []) == 1


def test_penalties_leave_the_logits_as_they_were() -> None:
    logits = LOGITS.copy()
    sample(logits, Sampling(seed=0, repetition_penalty=2.0, presence_penalty=1.0), [0], [1])
    assert (logits == LOGITS).all()


def test_logprobs_are_of_the_model_and_sorted() -> None:
    result = token_logprob(LOGITS + 3, 2, 3)
    assert result.token_id == 2 and result.logprob == pytest.approx(np.log(0.125), abs=1e-6)
    assert [token for token, _ in result.top] == [0, 1, 2]
    assert [value for _, value in result.top] == pytest.approx(np.log([0.5, 0.25, 0.125]), abs=1e-6)
    assert token_logprob(LOGITS, 0, 0).top == []


@settings(max_examples=100, deadline=None)
@given(
    logits=st.lists(st.floats(-20, 20, width=32), min_size=1, max_size=40),
    temperature=st.floats(0.01, 3),
    top_k=st.integers(0, 45),
    top_p=st.floats(0.01, 1),
    min_p=st.floats(0, 1),
    position=st.integers(0, 100),
)
def test_a_drawn_token_is_one_that_the_definitions_keep(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float, position: int
) -> None:
    sampling = Sampling(seed=1, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    token = sample(np.array(logits, np.float32), sampling, [0] * position, [])
    scaled = np.array(logits, np.float32).astype(np.float64) / temperature
    weights = np.exp(scaled - scaled.max())
    order = sorted(range(len(logits)), key=lambda index: (-scaled[index], index))[: top_k or None]
    rank = order.index(token)
    kept = weights[order]
    assert kept[:rank].sum() / kept.sum() <= top_p + 1e-9
    assert weights[token] >= min_p


tiny = st.floats(2.0**-149, 1, width=32)


@settings(deadline=None)
@given(
    logits=st.lists(st.floats(-(2.0**127), 2.0**127, width=32), min_size=1, max_size=8),
    temperature=st.just(0.0) | tiny | st.floats(1, 100),
    repetition_penalty=tiny | st.floats(1, 100),
    other_penalty=st.floats(-2, 2),
    top_k=st.integers(0, 9),
    top_p=tiny,
    min_p=st.just(0.0) | tiny,
)
def test_every_request_that_is_accepted_gets_a_token(
    logits: list[float], temperature: float, repetition_penalty: float, other_penalty: float, top_k: int, top_p: float, min_p: float
) -> None:
    penalties = {"repetition_penalty": repetition_penalty, "presence_penalty": other_penalty, "frequency_penalty": other_penalty}
    sampling = Sampling(seed=1, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, **penalties)
    with np.errstate(all="raise", under="ignore"):
        assert 0 <= sample(np.array(logits, np.float32), sampling, [0], [len(logits) - 1]) < len(logits)
