"""The cost of steps: the fit explains what it was fitted to, more work never looks cheaper, and observations move it within bounds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decodefleet_agent.engine.step_cost import StepCost, Work, chunk_pairs, fit
from decodefleet_agent.messages import CurvePoint, MixedPoint

SIZES, CHUNKS = (1, 2, 4, 8, 16), (16, 64, 256)
CONTEXT, LONG = 128, 1024
PER_TOKEN, PER_PAIR = 3e-7, 2e-8


def truth(batch: int, context: int, chunk: int = 0, start: int = 0) -> float:
    rows = 0.002 + 0.0006 * batch + PER_TOKEN * batch * context
    return rows + (0.0005 * chunk + PER_PAIR * chunk_pairs(start, chunk) if chunk else 0.0)


def mixed(batch: int, context: int, chunk: int, start: int) -> MixedPoint:
    return MixedPoint(batch, context, chunk, start, truth(batch, context, chunk, start))


CURVE = [CurvePoint(n, truth(n, CONTEXT), n / truth(n, CONTEXT)) for n in SIZES]
MIXED = [
    *(mixed(batch, CONTEXT, chunk, 0) for batch in (1, 16) for chunk in CHUNKS),
    mixed(16, CONTEXT, 64, LONG),
    mixed(16, LONG, 0, 0),
]


def fitted() -> StepCost:
    cost = fit(CURVE, MIXED, CONTEXT)
    assert cost is not None
    return cost


@pytest.mark.parametrize("batch", [1, 3, 16, 40])
@pytest.mark.parametrize("context", [128, 700, 4000])
@pytest.mark.parametrize(("chunk", "start"), [(0, 0), (16, 0), (100, 0), (512, 1500), (2048, 0)])
def test_the_fit_predicts_also_between_and_beyond_its_points(batch: int, context: int, chunk: int, start: int) -> None:
    predicted = fitted().seconds(Work(batch, batch * context).chunk(start, chunk))
    assert predicted == pytest.approx(truth(batch, context, chunk, start), rel=0.02)


def test_nothing_is_fitted_to_nothing() -> None:
    assert fit([], MIXED, CONTEXT) is None
    assert fit(CURVE, [], CONTEXT) is None


def test_one_batch_size_and_one_chunk_are_enough() -> None:
    cost = fit(CURVE[:1], [mixed(1, CONTEXT, 15, 0)], CONTEXT)
    assert cost is not None
    assert cost.seconds(Work(1, CONTEXT).chunk(0, 15)) == pytest.approx(truth(1, CONTEXT, 15))
    assert cost.added(30, 0) == pytest.approx(2 * cost.added(15, 0))


noise = st.lists(st.floats(0.3, 3), min_size=len(CURVE) + len(MIXED), max_size=len(CURVE) + len(MIXED))
works = st.builds(Work, st.integers(1, 100), st.integers(0, 10**6), st.integers(0, 4096), st.integers(0, 10**7))


@given(noise=noise, work=works, more=st.integers(1, 500), start=st.integers(0, 5000))
def test_noise_never_makes_more_work_cheaper(noise: list[float], work: Work, more: int, start: int) -> None:
    curve = [CurvePoint(p.batch, p.step_seconds * n, 1.0) for p, n in zip(CURVE, noise, strict=False)]
    points = [
        MixedPoint(p.batch, p.context, p.chunk, p.start, p.step_seconds * n) for p, n in zip(MIXED, noise[len(CURVE) :], strict=True)
    ]
    cost = fit(curve, points, CONTEXT)
    assert cost is not None
    slack = 1 + 1e-9
    assert 0 < cost.seconds(work) <= cost.seconds(work.chunk(start, more)) * slack
    assert cost.plain(work.decodes, work.context) <= cost.plain(work.decodes, work.context + more) * slack
    assert cost.plain(work.decodes, work.decodes * CONTEXT) <= cost.plain(work.decodes + more, (work.decodes + more) * CONTEXT) * slack


@given(st.lists(st.tuples(works, st.floats(0, 1e4)), max_size=60))
def test_no_observation_takes_it_out_of_bounds(observed: list[tuple[Work, float]]) -> None:
    cost = fitted()
    for work, seconds in observed:
        before = cost
        cost = cost.corrected(work, seconds)
        for old, new in ((before.decode_factor, cost.decode_factor), (before.prefill_factor, cost.prefill_factor)):
            assert 1 / 8 <= new <= 8 and 0.93 <= new / old <= 1.08


def test_it_follows_a_machine_that_slows_down_and_comes_back() -> None:
    cost = fitted()
    decode, with_prompt = Work(8, 8 * CONTEXT), Work(8, 8 * CONTEXT).chunk(0, 128)
    for slowness in (3.0, 1.0):
        for _ in range(100):
            for work in (decode, with_prompt):
                cost = cost.corrected(work, slowness * fitted().seconds(work))
        assert cost.decode_factor == pytest.approx(slowness, rel=0.02)
        assert cost.prefill_factor == pytest.approx(slowness, rel=0.05)


def test_a_single_outlier_changes_little_and_a_prompt_alone_nothing() -> None:
    cost = fitted()
    assert cost.corrected(Work(8, 1024), 100.0).decode_factor < 1.08
    assert cost.corrected(Work().chunk(0, 512), 100.0) == cost
