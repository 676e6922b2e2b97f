"""The pace of the engine: who has a row in each step, how much of prompts enters beside them, and what an objective changes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
from engine_world import LIMITS, Streams, start, submit

from decodefleet_agent.engine.batch import Batch
from decodefleet_agent.engine.chunks import Chunk
from decodefleet_agent.engine.controllers import CONTROLLERS
from decodefleet_agent.engine.controllers.base import Decision, Limits
from decodefleet_agent.engine.step_cost import StepCost
from decodefleet_agent.messages import Targets


def test_every_decoding_sequence_has_a_row_in_every_step_although_more_might_run_than_a_step_holds() -> None:
    streams = start(Limits(40, 16, None, 100), pages=200)
    streams.handle(*(submit(n, [n], 30) for n in range(40)))
    for _ in range(20):
        decoding = {n for n, outputs in streams.outputs.items() if not outputs[-1].finish}
        streams.step()
        assert decoding <= {span.sequence_id for span in streams.backend.batches[-1].spans}
    assert max(len(batch.spans) for batch in streams.backend.batches) == 16


def test_the_room_of_a_decision_is_for_all_prompts_together_and_the_first_may_exceed_it() -> None:
    streams = start(replace(LIMITS, max_batch=8, max_batch_tokens=500), controller=lambda situation: Decision(8, 50))
    streams.handle(*(submit(n, [n] * length, 9) for n, length in enumerate([80, 20, 30, 1])))
    for _ in range(3):
        streams.step()
    prompts = [[span.length for span in batch.spans if span.start == 0] for batch in streams.backend.batches]
    assert prompts == [[80], [20, 30], [1]]


def test_no_more_are_admitted_than_the_decision_says_and_those_that_run_go_on() -> None:
    most = 3
    streams = start(replace(LIMITS, max_batch=8), controller=lambda situation: Decision(most, 64))
    streams.handle(*(submit(n, [n], 20) for n in range(6)))
    streams.step()
    most = 1
    for _ in range(5):
        streams.step()
    assert [len(batch.spans) for batch in streams.backend.batches] == [3] * 6
    streams.finish()


@dataclass
class Machine:
    """A clock that a backend moves: `seconds` for each row of a prompt, on top of those of a step."""

    now: float = 0.0
    slowness: float = 1.0

    def monotonic(self) -> float:
        return self.now

    def run(self, streams: Streams) -> None:
        honest = streams.backend.step

        def step(batch: Batch) -> np.ndarray:
            decodes = sum(span.length == 1 for span in batch.spans)
            self.now += self.slowness * (0.001 + 0.0005 * decodes + 0.0005 * (batch.rows - decodes))
            return honest(batch)

        streams.backend.step = step  # type: ignore[method-assign]


@pytest.mark.parametrize("objective", [None, 0.02])
def test_dynamic_chunks_keep_the_pace_of_those_that_decode(monkeypatch: pytest.MonkeyPatch, objective: float | None) -> None:
    """On a clock on which a step takes what its rows cost, the prompt's rows as much as the others."""
    machine = Machine()
    monkeypatch.setattr("decodefleet_agent.engine.engine.time", machine)
    monkeypatch.setattr("decodefleet_agent.engine.scheduler.time", machine)
    cost = StepCost(((1, 0.0015), (16, 0.009)), 1, ((16, 0.008), (64, 0.032)))

    def gaps_and_first_token(chunk: Chunk) -> tuple[float, float]:
        streams = start(Limits(16, 4096, chunk, 8), 400, 3000, CONTROLLERS["SLAFeedback"])
        streams.engine.cost = cost
        streams.handle(Targets(time_per_output_token=objective if chunk else None))
        machine.run(streams)
        streams.handle(*(submit(n, [n], 2000) for n in range(15)))
        for _ in range(3):
            streams.step()
        arrived = machine.now
        streams.handle(submit(15, [1] * 2048, 1))
        largest = 0.0
        while 15 not in streams.outputs:
            before = machine.now
            streams.step()
            largest = max(largest, machine.now - before)
            assert {span.sequence_id for span in streams.backend.batches[-1].spans} == set(range(16))
        return largest, machine.now - arrived

    gap, first = gaps_and_first_token("Dynamic")
    whole_gap, whole_first = gaps_and_first_token(None)
    if objective is not None:
        assert gap <= objective
    else:
        assert gap <= whole_gap / 3 and first <= 1.5 * whole_first


def test_the_objective_bounds_the_batch_of_a_machine_that_turns_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine()
    monkeypatch.setattr("decodefleet_agent.engine.engine.time", machine)
    monkeypatch.setattr("decodefleet_agent.engine.scheduler.time", machine)
    streams = start(Limits(16, 64, "Dynamic", 8), 400, 400, CONTROLLERS["SLAFeedback"])
    streams.engine.cost = StepCost(((1, 0.0015), (16, 0.009)), 1, ((16, 0.008),))
    streams.handle(Targets(time_per_output_token=0.015))
    machine.run(streams)
    numbers = iter(range(10_000))

    def limit_after(steps: int) -> int:
        for _ in range(steps):
            while streams.engine.stats().waiting < 4:
                streams.handle(submit(next(numbers), [1], 15))
            streams.step()
        return streams.engine.stats().batch_limit

    assert limit_after(50) == 16
    machine.slowness = 3.0
    assert 5 <= limit_after(300) <= 7
    assert len(streams.backend.batches[-1].spans) <= 7
    machine.slowness = 1.0
    assert limit_after(300) == 16


def test_the_tokens_of_a_step_are_bounded_and_the_text_does_not_depend_on_it() -> None:
    tokens, steps = {}, {}
    for most in (16, 64):
        streams = start(replace(LIMITS, max_batch_tokens=most))
        streams.handle(*(submit(n, [n] * 40, 5) for n in range(4)))
        streams.finish()
        assert max(batch.rows for batch in streams.backend.batches) == most
        tokens[most] = [streams.tokens(n) for n in range(4)]
        steps[most] = len(streams.backend.batches)
    assert tokens[16] == tokens[64] and steps[16] > steps[64]


def test_the_formula_cuts_by_length_and_cores() -> None:
    streams = start(Limits(4, 2048, "Formula", 8, cores=2), pages=200, context=2000)
    streams.handle(submit(1, [1] * 1200, 1))
    streams.finish()
    assert [batch.rows for batch in streams.backend.batches] == [150] * 8


def test_without_neighbours_nothing_is_cut_and_without_a_measurement_a_fixed_chunk_is() -> None:
    streams = start(Limits(4, 2048, "Dynamic", 8), pages=200, context=2000)
    streams.handle(submit(1, [1] * 1000, 30))
    streams.step()
    streams.handle(submit(2, [2] * 600, 1))
    for _ in range(3):
        streams.step()
    assert [batch.rows for batch in streams.backend.batches] == [1000, 257, 257, 89]
