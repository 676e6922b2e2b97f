"""Batch controllers and chunk sizes: what holds in every situation, and that the loop of decision and observation settles and recovers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decodefleet_agent.engine.chunks import PATIENCE, STEP_SHARE, cut, dynamic_chunk_scheduler, prefill_room
from decodefleet_agent.engine.controllers import CONTROLLERS
from decodefleet_agent.engine.controllers.base import Limits, Situation
from decodefleet_agent.engine.controllers.sla_feedback import DECODE_SHARE, most_sequences, sla_feedback
from decodefleet_agent.engine.step_cost import StepCost, Work
from decodefleet_agent.messages import Targets

SIZES = (1, 2, 4, 8, 16, 32, 64)
CHUNKS = (16, 64, 256)
# A machine much like two cores with a small model: 2 ms for one row, 0.6 ms for each further one.
COST = StepCost(tuple((n, 0.0014 + 0.0006 * n) for n in SIZES), 128, tuple((n, 0.0006 * n) for n in CHUNKS), 1e-7, 1e-8)
LIMITS = Limits(max_batch=64, max_batch_tokens=2048, chunk="Dynamic", batch_size_threshold=8)


def beside(streams: int, remaining: int = 2048, **fields: object) -> Situation:
    """A prompt that waits while streams decode at a context of 128."""
    given = Situation(LIMITS, streams, 1, Work(streams, 128 * streams), prompt_remaining=remaining, cost=COST)
    return replace(given, **fields)  # type: ignore[arg-type]


def rising(sizes: tuple[int, ...]) -> st.SearchStrategy[tuple[tuple[int, float], ...]]:
    steps = st.lists(st.floats(1e-5, 0.1), min_size=len(sizes), max_size=len(sizes))
    return steps.map(lambda steps: tuple((size, sum(steps[: index + 1])) for index, size in enumerate(sizes)))


costs = st.builds(
    StepCost,
    decode=rising(SIZES),
    context=st.just(128),
    prefill=rising(CHUNKS),
    per_token=st.floats(0, 1e-6),
    per_pair=st.floats(0, 1e-6),
    decode_factor=st.floats(0.2, 5),
    prefill_factor=st.floats(0.2, 5),
)
limits = st.builds(
    Limits,
    max_batch=st.integers(1, 200),
    max_batch_tokens=st.integers(16, 5000),
    chunk=st.sampled_from([None, 16, 512, "Dynamic", "Formula"]),
    batch_size_threshold=st.integers(1, 20),
)
thresholds = st.none() | st.floats(1e-4, 10)


@st.composite
def situations(draw: st.DrawFn, measured: bool = True) -> Situation:
    given = draw(limits)
    running = draw(st.integers(0, given.most_running))
    decodes = draw(st.integers(0, running))
    return Situation(
        given,
        running=running,
        waiting=draw(st.integers(0, 300)),
        work=Work(decodes, decodes * draw(st.integers(1, 8000))),
        prompt_start=draw(st.integers(0, 4000)),
        prompt_remaining=draw(st.integers(0, 8000)),
        prompt_waited=draw(st.floats(0, 100)),
        targets=Targets(draw(thresholds), draw(thresholds)),
        cost=draw(costs if measured else st.none() | costs),
    )


@pytest.mark.parametrize("name", CONTROLLERS)
@given(situation=situations(measured=False))
def test_every_decision_is_within_the_limits_and_lets_something_progress(name: str, situation: Situation) -> None:
    decision = CONTROLLERS[name](situation)
    assert 1 <= decision.max_running <= min(situation.limits.max_batch, situation.limits.max_batch_tokens)
    assert 1 <= decision.prefill_tokens <= situation.limits.max_batch_tokens
    assert CONTROLLERS[name](situation) == decision


@given(situation=situations(), tight=st.floats(1e-4, 10), factor=st.floats(1, 100))
def test_a_looser_objective_never_takes_anything_away(situation: Situation, tight: float, factor: float) -> None:
    at_tight = replace(situation, targets=Targets(tight))
    at_loose = replace(situation, targets=Targets(tight * factor))
    assert prefill_room(at_tight) <= prefill_room(at_loose)
    if attainable(at_tight):
        assert most_sequences(at_tight) <= most_sequences(at_loose)


@given(situation=situations(), objective=st.floats(1e-4, 10), slower=st.floats(1, 10))
def test_slower_steps_never_let_more_in(situation: Situation, objective: float, slower: float) -> None:
    before = replace(situation, targets=Targets(objective))
    assert before.cost is not None
    after = replace(before, cost=replace(before.cost, decode_factor=before.cost.decode_factor * slower))
    assert prefill_room(after) <= prefill_room(before)
    if attainable(after):
        assert most_sequences(after) <= most_sequences(before)


def attainable(situation: Situation) -> bool:
    cost, objective = situation.cost, situation.targets.time_per_output_token
    assert cost is not None and objective is not None
    mean = situation.work.context / situation.work.decodes if situation.work.decodes else cost.context
    return cost.plain(1, mean) <= DECODE_SHARE * objective


@given(situation=situations(), objective=st.floats(1e-4, 10))
def test_what_is_let_in_keeps_the_objective_as_far_as_is_known(situation: Situation, objective: float) -> None:
    situation = replace(situation, targets=Targets(objective))
    cost, work = situation.cost, situation.work
    assert cost is not None
    room = prefill_room(situation)
    if work.decodes and situation.prompt_remaining and room > 4:
        assert cost.seconds(work.chunk(situation.prompt_start, room)) <= STEP_SHARE * objective
    if attainable(situation):
        mean = work.context / work.decodes if work.decodes else cost.context
        batch = most_sequences(situation)
        assert cost.plain(batch, batch * mean) <= DECODE_SHARE * objective


@given(situation=situations())
def test_without_an_objective_the_prompt_is_not_much_later_than_in_one_piece(situation: Situation) -> None:
    situation = replace(situation, targets=Targets())
    remaining, cost, work = situation.prompt_remaining, situation.cost, situation.work
    assert cost is not None
    room = prefill_room(situation)
    if not work.decodes or not remaining or situation.burst:
        assert room == situation.limits.max_batch_tokens
    elif room < situation.limits.max_batch_tokens:
        chunk = min(room, remaining)
        plain = cost.plain(work.decodes, work.context)
        chunked = remaining / chunk * (plain + cost.added(chunk, 0))
        assert chunked <= PATIENCE * (plain + cost.added(remaining, 0)) * (1 + 1e-9)


def test_fifteen_streams_wait_for_a_small_part_of_a_long_prompt() -> None:
    situation = beside(15)
    room = prefill_room(situation)
    whole = COST.seconds(situation.work.chunk(0, 2048))
    assert COST.seconds(situation.work.chunk(2048 - room, room)) < whole / 10


def test_a_prompt_in_danger_of_its_own_objective_is_let_in_faster_and_a_lost_one_is_not() -> None:
    calm = prefill_room(beside(15, targets=Targets(None, 60.0)))
    assert calm == prefill_room(beside(15))
    urgent = prefill_room(beside(15, targets=Targets(None, 1.55)))
    assert urgent > calm
    assert prefill_room(beside(15, targets=Targets(None, 1.55), prompt_waited=1.5)) == calm


def test_many_that_wait_for_free_places_go_first_unless_there_is_an_objective() -> None:
    assert prefill_room(beside(15, waiting=8)) == LIMITS.max_batch_tokens
    assert prefill_room(beside(15, waiting=7)) < LIMITS.max_batch_tokens
    assert prefill_room(beside(60, waiting=8)) < LIMITS.max_batch_tokens, "there are only four places"
    assert prefill_room(beside(15, waiting=8, targets=Targets(0.05))) < LIMITS.max_batch_tokens


def test_an_objective_bounds_the_batch_and_one_that_cannot_be_kept_bounds_nothing() -> None:
    def at(milliseconds: float) -> int:
        return sla_feedback(beside(1, targets=Targets(milliseconds / 1000))).max_running

    assert [at(1), at(3), at(10), at(1000)] == [64, 1, 11, 64]
    assert CONTROLLERS["Static"](beside(1, targets=Targets(0.003))).max_running == 64


def test_chunks_that_are_not_dynamic_are_the_controllers_only_with_an_objective() -> None:
    fixed = replace(LIMITS, chunk=512)
    assert [c(beside(15, limits=fixed)).prefill_tokens for c in CONTROLLERS.values()] == [2048, 2048]
    with_objective = [c(beside(15, limits=fixed, targets=Targets(0.05))).prefill_tokens for c in CONTROLLERS.values()]
    assert with_objective[0] == 2048 and with_objective[1] < 100


def test_the_loop_settles_when_the_machine_is_slower_than_measured_and_recovers() -> None:
    objective = 0.05
    cost = COST

    def after(steps: int, slowness: float) -> tuple[int, float]:
        """The batch limit, and the time of the last mixed step, when steps take so many times what was measured."""
        nonlocal cost
        seconds = 0.0
        for step in range(steps):
            situation = beside(20, targets=Targets(objective), cost=cost)
            decision = sla_feedback(situation)
            work = situation.work.chunk(0, decision.prefill_tokens) if step % 2 else situation.work
            took = slowness * COST.seconds(work)
            cost = cost.corrected(work, took)
            seconds = max(took, seconds) if step >= steps - 2 else 0.0
        return decision.max_running, seconds

    limit, seconds = after(2, 1.0)
    assert limit == 64 and seconds <= objective
    slow_limit, seconds = after(200, 2.5)
    assert slow_limit < 30 and seconds <= objective
    limit, seconds = after(200, 1.0)
    assert limit == 64 and seconds <= objective


@given(st.integers(1, 10**6), st.integers(1, 10_000))
def test_the_formula(length: int, cores: int) -> None:
    assert dynamic_chunk_scheduler(length, cores) == max(1, int(max(1, length // (cores * 2)) * min(1.5, cores / 4)))


def test_the_formula_by_example() -> None:
    assert dynamic_chunk_scheduler(1024, 8) == 96
    assert dynamic_chunk_scheduler(2048, 2) == 256
    for bad in ((0, 8), (8, 0), (-1, -1)):
        with pytest.raises(ValueError, match="must be at least 1"):
            dynamic_chunk_scheduler(*bad)


@given(
    chunk=st.sampled_from([None, 1, 64, 5000, "Dynamic", "Formula"]),
    remaining=st.integers(1, 5000),
    computed=st.integers(0, 5000),
    room=st.integers(-5, 5000),
    cores=st.integers(1, 64),
)
def test_a_cut_is_never_nothing_and_never_more_than_there_is(chunk, remaining: int, computed: int, room: int, cores: int) -> None:
    size = cut(chunk, remaining + computed, remaining, room, cores, 512)
    assert 1 <= size <= remaining
    if remaining + computed < 512 or chunk is None:
        assert size == remaining
