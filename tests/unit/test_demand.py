"""Demand from counters: exact over windows, and not fooled by restarts, replaced pods, silence or clocks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_world import NOW, load

from decodefleet_operator.demand import HORIZON, MAX_GAP, History, demand, record
from decodefleet_operator.observation import Load


def agent(at: float, requests: float, instance: str = "i", finished: float | None = None, tokens: int = 50) -> Load:
    """An agent that got so many requests of 10 prompt tokens, asked for 100 tokens each, and answered with 50."""
    n, done = int(requests), int(requests if finished is None else finished)
    return load(
        at, instance, arrived_requests=n, arrived_prompt_tokens=10 * n, arrived_max_tokens=100 * n, finished_requests=done,
        finished_output_tokens=tokens * done, generated_tokens=tokens * done, busy_seconds=0.25 * (at - NOW),
    )  # fmt: skip


def steady(seconds: int, rate: float = 2.0, pods: int = 1, start: int = 0, history: History | None = None) -> History:
    history = history or History()
    for t in range(start, seconds + 1):
        history = record(history, {f"p{i}": agent(NOW + t, rate * t, f"i{i}") for i in range(pods)}, NOW + t)
    return history


def test_rates_of_a_steady_fleet() -> None:
    d = demand(steady(400, pods=3), 300, NOW + 400)
    assert d is not None
    assert (d.window, d.requests, d.prompt_tokens, d.output_tokens, d.generated_tokens) == pytest.approx((300, 6, 60, 300, 300))
    assert d.busy == pytest.approx(0.25)


def test_windows_see_a_step_apart() -> None:
    history = steady(300)
    for t in range(301, 331):
        history = record(history, {"p0": agent(NOW + t, 600 + 20 * (t - 300), "i0")}, NOW + t)
    short, long = demand(history, 30, NOW + 330), demand(history, 300, NOW + 330)
    assert short is not None and long is not None
    assert short.requests == pytest.approx(20) and long.requests == pytest.approx((30 * 20 + 270 * 2) / 300)


def test_too_little_is_unknown() -> None:
    assert demand(History(), 30, NOW) is None
    assert demand(steady(1), 30, NOW + 1) is None
    assert demand(steady(50), 30, NOW + 50 + MAX_GAP + 1) is None  # nobody has sampled since
    d = demand(steady(5), 30, NOW + 5)
    assert d is not None and d.window == pytest.approx(5)


def test_a_known_zero_is_zero() -> None:
    d = demand(steady(60, rate=0), 30, NOW + 60)
    assert d is not None and (d.requests, d.output_tokens, d.generated_tokens) == (0, 0, 0)


def test_a_restarted_agent_counts_from_zero() -> None:
    history = steady(100)
    for t in range(101, 131):
        history = record(history, {"p0": agent(NOW + t, 2 * (t - 100), "j")}, NOW + t)
    d = demand(history, 30, NOW + 130)
    assert d is not None and d.requests == pytest.approx(2)


def test_a_pod_that_was_never_seen_brings_no_past() -> None:
    history = steady(100)
    for t in range(101, 131):
        history = record(history, {"p0": agent(NOW + t, 2 * t, "i0"), "p9": agent(NOW + t, 1_000_000, "old")}, NOW + t)
    d = demand(history, 30, NOW + 130)
    assert d is not None and d.requests == pytest.approx(2)


def test_a_pod_that_goes_takes_nothing_back() -> None:
    history = steady(100, pods=2)
    for t in range(101, 131):
        history = record(history, {"p0": agent(NOW + t, 2 * t, "i0")}, NOW + t)
    d = demand(history, 60, NOW + 130)
    assert d is not None and d.requests == pytest.approx((30 * 4 + 30 * 2) / 60)


def test_what_came_in_silence_is_spread_over_it() -> None:
    history = steady(100, pods=2)
    for t in range(101, 201):
        heard = {"p0": agent(NOW + t, 2 * t, "i0"), "p1": agent(NOW + (t if t == 200 else 100), 2 * t if t == 200 else 200, "i1")}
        history = record(history, heard, NOW + t)
    d = demand(history, 30, NOW + 200)
    assert d is not None and d.requests == pytest.approx(2, rel=0.1)  # not 2 + 200 / 30


@pytest.mark.parametrize("jump", [-3600.0, -5.0, 3600.0])
def test_a_clock_that_jumps_starts_anew(jump: float) -> None:
    history = record(steady(100), {"p0": agent(NOW + 101 + jump, 202, "i0")}, NOW + 101 + jump)
    assert demand(history, 30, NOW + 101 + jump) is None
    for t in range(102, 112):
        history = record(history, {"p0": agent(NOW + t + jump, 2 * t, "i0")}, NOW + t + jump)
    d = demand(history, 30, NOW + 111 + jump)
    assert d is not None and d.requests == pytest.approx(2)


def test_answers_of_unknown_length_count_as_what_was_asked_for() -> None:
    history = History()
    for t in range(31):
        history = record(history, {"p0": agent(NOW + t, 2 * t, finished=0)}, NOW + t)
    d = demand(history, 30, NOW + 30)
    assert d is not None and d.output_tokens == pytest.approx(2 * 100)


def test_histories_stay_small() -> None:
    history = steady(3000)
    assert len(history.ticks) <= 160
    assert [tick.at for tick in history.ticks] == sorted(tick.at for tick in history.ticks)
    d = demand(history, HORIZON, NOW + 3000)
    assert d is not None and (d.window, d.requests) == pytest.approx((HORIZON, 2))


@given(st.lists(st.tuples(st.floats(0.1, 8), st.integers(0, 40), st.integers(0, 9)), min_size=2, max_size=60))
def test_nothing_is_lost_or_counted_twice(rounds: list[tuple[float, int, int]]) -> None:
    """Whatever the rhythm and the restarts, requests that were read add up."""
    history, at, count, born, arrived = History(), NOW, 0, 0, 0
    history = record(history, {"p": agent(at, 0, "i0")}, at)
    for pause, requests, dies in rounds:
        at += pause
        if dies == 0:
            born, count = born + 1, 0
        count += requests
        arrived += requests
        history = record(history, {"p": agent(at, count, f"i{born}")}, at)
    d = demand(history, HORIZON, at)
    if at - NOW >= 2.0:
        assert d is not None and d.requests * d.window == pytest.approx(arrived)
