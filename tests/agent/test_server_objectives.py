"""When a request counts for an objective, and as what; quantiles."""

from __future__ import annotations

import subprocess
import sys

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from decodefleet.config import AgentConfig
from decodefleet.v1.control_pb2 import ConfigureRequest, Objective
from decodefleet_agent.messages import Targets
from decodefleet_agent.server.agent import Agent
from decodefleet_agent.server.control import AgentControl
from decodefleet_agent.server.objectives import Measured, Objectives, Outcome, quantile

METRICS = {
    "ttft": Objective.TIME_TO_FIRST_TOKEN,
    "tpot": Objective.TIME_PER_OUTPUT_TOKEN,
    "duration": Objective.REQUEST_DURATION,
    "queue": Objective.QUEUE_TIME,
    "up": Objective.AVAILABILITY,
}


class Counts:
    def __init__(self) -> None:
        self.counted: list[tuple[str, bool]] = []

    def count_objective(self, name: str, good: bool) -> None:
        self.counted.append((name, good))

    def reset_objective(self, name: str) -> None: ...

    def drop_objective(self, name: str) -> None: ...


def verdicts(outcome: Outcome, measured: Measured, threshold: float = 1.0) -> dict[str, bool]:
    counts = Counts()
    objectives = Objectives(counts)
    objectives.configure(1, [Objective(name=n, metric=m, threshold_seconds=threshold, target=0.9) for n, m in METRICS.items()])
    given = objectives.count(outcome, measured)
    assert dict(counts.counted) == given and len(counts.counted) == len(given)
    return given


SERVED = Measured(duration=3.0, queue_time=0.1, time_to_first_token=0.5, time_per_output_token=0.2, open_time_per_output_token=0.3)


def test_served_requests_count_by_their_times() -> None:
    assert verdicts(Outcome.finished, SERVED) == {"ttft": True, "tpot": True, "duration": False, "queue": True, "up": True}


def test_exactly_the_threshold_is_good() -> None:
    assert verdicts(Outcome.finished, SERVED, threshold=0.5)["ttft"] is True


@pytest.mark.parametrize("outcome", [Outcome.rejected, Outcome.failed, Outcome.deadline])
def test_what_was_not_served_is_bad_everywhere(outcome: Outcome) -> None:
    assert verdicts(outcome, SERVED) == dict.fromkeys(METRICS, False)
    assert verdicts(outcome, Measured(duration=0.0)) == dict.fromkeys(METRICS, False)


def test_a_single_token_has_no_time_per_token() -> None:
    assert "tpot" not in verdicts(Outcome.finished, Measured(duration=0.5, queue_time=0.1, time_to_first_token=0.5))


@pytest.mark.parametrize(
    ("measured", "expected"),
    [
        (Measured(duration=0.5), {}),  # nothing decided, nothing late
        (Measured(duration=2.0), {"ttft": False, "duration": False, "queue": False}),  # gave up in the queue, late
        (Measured(duration=2.0, queue_time=0.1), {"ttft": False, "duration": False, "queue": True}),  # late in its prefill
        (Measured(duration=0.9, queue_time=0.1, time_to_first_token=0.5, open_time_per_output_token=0.4), {"ttft": True, "queue": True}),
        (
            Measured(duration=5.0, queue_time=0.1, time_to_first_token=1.5, open_time_per_output_token=3.5),
            {"ttft": False, "queue": True, "duration": False, "tpot": False},
        ),
    ],
)
def test_cancelled_requests_count_where_they_were_decided(measured: Measured, expected: dict[str, bool]) -> None:
    assert verdicts(Outcome.cancelled, measured) == expected


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50), st.floats(0.001, 0.999))
def test_quantiles_are_numpys(values: list[float], share: float) -> None:
    assert quantile(values, share) == pytest.approx(float(numpy.quantile(values, share)), rel=1e-9, abs=1e-9)
    assert quantile([], share) is None


def test_the_server_process_loads_no_torch() -> None:
    code = "import sys, decodefleet_agent.server.service; print(sorted({'torch', 'transformers', 'numpy', 'gguf'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


async def test_the_engine_is_told_the_strictest_latencies_and_nothing_of_an_older_generation() -> None:
    told: list[Targets] = []

    async def drain(seconds: float) -> None:
        raise AssertionError("nobody asked for that")

    control = AgentControl(Agent(AgentConfig(model_uri="file:///m")), None, drain, told.append)

    async def configure(generation: int, **thresholds: float) -> None:
        given = [
            Objective(name=name, metric=METRICS[name.rstrip("2")], threshold_seconds=threshold, target=0.9)
            for name, threshold in thresholds.items()
        ]
        await control.Configure(ConfigureRequest(generation=generation, objectives=given), None)  # type: ignore[arg-type]

    await configure(2, tpot=0.05, tpot2=0.02, ttft=1.5, duration=0.001, queue=0.001)
    await configure(1, tpot=0.001)
    await configure(3, duration=9.0)
    assert told == [Targets(0.02, 1.5), Targets()]
