"""The curve that one replica is believed to have, and the point of it that the objectives allow."""

from __future__ import annotations

from typing import Any

import pytest
from plan_world import CURVE, NOW, load, pod

from decodefleet_operator.api import Objective
from decodefleet_operator.capacity import Capacity, median, of_revision, operating_point, remember
from decodefleet_operator.observation import CurvePoint, Load, Memory


def measured(factor: float, instance: str) -> Load:
    """An agent whose machine is `factor` times as fast."""
    curve = tuple(CurvePoint(p.batch, p.step_seconds / factor, p.tokens_per_second * factor) for p in CURVE)
    return load(instance=instance, curve=curve, prefill_tokens_per_second=1000.0 * factor)


def rates(memory: Memory, revision: str = "r1") -> tuple[float, float]:
    """Decode rate at batch 16 and prefill rate."""
    known = of_revision(memory, revision)
    assert known is not None and known.prefill is not None
    return known.curve[-1].tokens_per_second, known.prefill


def after(memory: Memory, *factors: float) -> Memory:
    """The memory after pods 0, 1, ... with these factors were heard, twice."""
    pods = [pod(n) for n in range(len(factors))]
    loads = {p.name: measured(factor, f"i{n}") for n, (p, factor) in enumerate(zip(pods, factors, strict=True))}
    memory = remember(memory, pods, loads, "r1", NOW)
    return remember(memory, pods, loads, "r1", NOW + 5)


def test_the_first_measurement_is_taken_and_others_by_their_median() -> None:
    assert rates(after(Memory(NOW), 0.5)) == pytest.approx((200, 500))
    assert rates(after(Memory(NOW), 0.5, 1.0, 1.1)) == pytest.approx((400, 1000))


def test_a_new_measurement_moves_it_at_most_a_fifth_and_once() -> None:
    memory = after(Memory(NOW), 1.0)
    memory = after(memory, 1.0, 0.1)  # beside a busy one: the median of 400 and 40 is 220, but 400 x 0.8 is the limit
    assert rates(memory) == pytest.approx((320, 800))
    memory = after(memory, 1.0, 0.1, 3.0)  # the median is 400 again: 320 x 1.2
    assert rates(memory) == pytest.approx((384, 960))
    assert after(memory, 1.0, 0.1, 3.0) == memory


def test_each_revision_has_its_own_and_a_new_one_borrows() -> None:
    memory = after(Memory(NOW), 1.0)
    assert rates(memory, "r2") == (400, 1000)
    both = [pod(0), pod(0, "r2")]
    memory = remember(memory, both, {"f-r1-0": measured(1.0, "i0"), "f-r2-0": measured(2.0, "j0")}, "r2", NOW)
    assert rates(memory, "r2") == (800, 2000) and rates(memory, "r1") == (400, 1000)
    memory = remember(memory, both[1:], {}, "r2", NOW)
    assert [entry[0] for entry in memory.capacity] == ["r2"]


def test_nothing_measured_is_unknown() -> None:
    assert of_revision(remember(Memory(NOW), [pod(0)], {"f-r1-0": load(curve=())}, "r1", NOW), "r1") is None


TPOT = {"name": "o", "metric": "TimePerOutputToken"}
TTFT = {"name": "o", "metric": "TimeToFirstToken"}
TOTAL = {"name": "o", "metric": "RequestDuration"}


@pytest.mark.parametrize(
    ("objective", "batch", "unreachable"),
    [
        ({**TPOT, "threshold": "40ms"}, 16, ()),
        ({**TPOT, "threshold": "39ms"}, 4, ()),
        ({**TPOT, "threshold": "10ms"}, 1, ()),
        ({**TPOT, "threshold": "9ms"}, 16, ("o",)),  # no batch size buys it
        ({**TTFT, "threshold": "125ms"}, 4, ()),  # 100 prompt tokens take 100 ms, which leaves 25 for a step
        ({**TTFT, "threshold": "100ms"}, 16, ("o",)),
        ({**TOTAL, "threshold": "1200ms"}, 4, ()),  # (1200 - 100) / 50 tokens is 22 ms
        ({"name": "o", "metric": "QueueTime", "threshold": "1ms"}, 16, ()),
        ({"name": "o", "metric": "Availability"}, 16, ()),
    ],
)
def test_the_largest_throughput_at_which_the_objectives_hold(objective: dict[str, Any], batch: int, unreachable: tuple[str, ...]) -> None:
    wanted = Objective.model_validate({**objective, "target": "95%"})
    found = operating_point(Capacity(CURVE, 1000.0, NOW), [wanted], prompt=100.0, output=50.0)
    assert (found.point.batch, found.unreachable) == (batch, unreachable)


def test_throughput_counts_not_batch_size() -> None:
    bent = (*CURVE, CurvePoint(32, 0.1, 320.0))
    assert operating_point(Capacity(bent, None, NOW), [], None, None).point.batch == 16


@pytest.mark.parametrize(("values", "middle"), [([3.0], 3.0), ([4.0, 1.0], 2.5), ([9.0, 1.0, 2.0], 2.0)])
def test_median(values: list[float], middle: float) -> None:
    assert median(values) == middle
