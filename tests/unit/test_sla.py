"""The ledger counts every request once, whatever restarts, and says what is promised and kept."""

from __future__ import annotations

import random
import uuid
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_world import NOW, deployment, load, observe, pod

from decodefleet_operator.api import Objective, Sla, Status
from decodefleet_operator.ledger import MAX_BYTES, Base, Bucket, Ledger, LedgerError, dumps, loads
from decodefleet_operator.observation import Load, ObjectiveCount, PodView
from decodefleet_operator.plan import plan
from decodefleet_operator.sla import advance, attainment, percent, sla_status

TTFT = Objective(name="ttft", metric="TimeToFirstToken", threshold="500ms", target="95%")
UP = Objective(name="up", metric="Availability", target="99.5%")
BOTH = [TTFT, UP]


def agent(good: int, total: int, at: float = NOW, instance: str = "i", epoch: int = 1, threshold: float = 0.5, **fields: Any) -> Load:
    """An agent that counted the same for both objectives."""
    counts = {"ttft": ObjectiveCount(good, total, threshold, epoch), "up": ObjectiveCount(good, total, 0.0, epoch)}
    return load(at, instance, objectives=counts, **fields)


def step(ledger: Ledger, answers: dict[str, Load], pods: list[PodView] | None = None, now: float = NOW, objectives: Any = None) -> Ledger:
    some = [pod(0)] if pods is None else pods
    return advance(ledger, BOTH if objectives is None else objectives, some, answers, 120.0, now)


def counted(ledger: Ledger, objective: Objective = TTFT, now: float = NOW, window: float = 3600.0) -> tuple[int, int]:
    a = attainment(ledger, objective, window, now)
    return a.good, a.total


def test_differences_are_counted_once() -> None:
    ledger = step(Ledger(), {"f-r1-0": agent(7, 10)})
    assert counted(ledger) == counted(ledger, UP) == (7, 10)
    assert step(ledger, {"f-r1-0": agent(7, 10)}) == ledger  # the same answer again
    ledger = step(loads(dumps(ledger)), {"f-r1-0": agent(8, 12, NOW + 5)}, now=NOW + 5)  # after a restart
    assert counted(ledger, now=NOW + 5) == (8, 12)


def test_a_new_instance_counts_from_zero_and_the_old_one_lost_what_it_ran() -> None:
    ledger = step(Ledger(), {"f-r1-0": agent(7, 10, running=2, waiting=1)})
    ledger = step(ledger, {"f-r1-0": agent(1, 1, NOW + 5, "j")}, now=NOW + 5)
    assert counted(ledger, now=NOW + 5) == (8, 14)  # 10 + 1, and 3 lost ones that are bad
    assert list(ledger.bases) == ["j"]


def test_a_pod_that_is_gone_loses_what_it_ran_and_only_once() -> None:
    ledger = step(Ledger(), {"f-r1-0": agent(7, 10, running=2)})
    ledger = step(ledger, {}, [], NOW + 5)
    assert counted(ledger, now=NOW + 5) == (7, 12) and not ledger.bases
    assert counted(step(ledger, {}, [], NOW + 6), now=NOW + 6) == (7, 12)


def test_no_answer_is_no_loss() -> None:
    ledger = step(Ledger(), {"f-r1-0": agent(7, 10, running=2)})
    assert step(ledger, {}, now=NOW + 60) == ledger


def test_an_agent_that_drains_within_its_time_loses_nothing() -> None:
    leaving = [pod(0, draining_since=NOW - 10, serving=False)]
    ledger = step(Ledger(), {"f-r1-0": agent(7, 10, running=2, state="DRAINING")}, leaving)
    assert counted(step(ledger, {}, [], NOW + 5), now=NOW + 5) == (7, 10)
    # One whose time is over was cut off.
    late = [pod(0, draining_since=NOW - 119, serving=False)]
    ledger = step(Ledger(), {"f-r1-0": agent(7, 10, running=2, state="DRAINING")}, late)
    assert counted(step(ledger, {}, [], NOW + 5), now=NOW + 5) == (7, 12)


def test_a_changed_threshold_starts_a_new_window_for_that_objective() -> None:
    ledger = step(Ledger(), {"f-r1-0": agent(7, 10)})
    tighter = [TTFT.model_copy(update={"threshold": "100ms"}), UP]
    ledger = step(ledger, {"f-r1-0": agent(8, 12, NOW + 1)}, now=NOW + 1, objectives=tighter)  # not told of it yet
    assert counted(ledger, now=NOW + 1) == (0, 0) and counted(ledger, UP, NOW + 1) == (8, 12)
    new = agent(14, 20, NOW + 2)
    new = replace(new, objectives={**new.objectives, "ttft": ObjectiveCount(1, 3, 0.1, 2)})
    ledger = step(ledger, {"f-r1-0": new}, now=NOW + 2, objectives=tighter)
    assert counted(ledger, now=NOW + 2) == (1, 3) and counted(ledger, UP, NOW + 2) == (14, 20)


def test_a_new_epoch_counts_from_zero() -> None:
    ledger = step(Ledger(), {"f-r1-0": agent(7, 10)})
    ledger = step(ledger, {"f-r1-0": agent(9, 12, NOW + 1, epoch=3)}, now=NOW + 1)
    assert counted(ledger, now=NOW + 1) == (16, 22)


def test_windows_forget() -> None:
    ledger = step(Ledger(), {"f-r1-0": agent(7, 10)})
    later = step(ledger, {"f-r1-0": agent(8, 12, NOW + 3000)}, now=NOW + 3000)
    assert counted(later, now=NOW + 3000) == (8, 12) and counted(later, now=NOW + 3000, window=300) == (1, 2)
    assert counted(later, now=NOW + 3700) == (1, 2)
    assert len(step(later, {"f-r1-0": agent(8, 12, NOW + 9000)}, now=NOW + 9000).buckets["ttft"]) == 0


def test_a_clock_that_went_back_counts_nothing_of_the_future() -> None:
    ledger = step(Ledger(), {"f-r1-0": agent(7, 10)})
    assert counted(ledger, now=NOW - 600) == (0, 0) and counted(ledger) == (7, 10)


def test_what_the_status_says() -> None:
    ledger = Ledger({"ttft": (Bucket(int(NOW) // 60 * 60, 60, 79, 80),)}, {}, {"ttft": 0.5, "up": 0.0})
    shown = sla_status(ledger, Sla(objectives=BOTH), [], NOW)
    ttft, up = shown.objectives
    # 79 of 80 is 98.75 %; one bad of four allowed leaves 75 % of the budget and burns a quarter as fast as allowed.
    assert (ttft.attainment, ttft.error_budget_remaining, ttft.burn_rate, ttft.requests) == ("98.75%", "75.00%", 0.25, 80)
    assert (up.attainment, up.error_budget_remaining, up.burn_rate, up.requests) == (None, None, None, None)  # unknown is not 100 %
    assert shown.attainment == "98.75%"


def test_a_missed_objective_is_a_condition() -> None:
    resource = deployment(replicas=1, sla={"objectives": [TTFT.model_dump(mode="json", by_alias=True, exclude_none=True)]})
    for good, expected in ((94, "False"), (95, "True"), (0, "Unknown")):
        o = observe(resource, [pod(0)], {"f-r1-0": agent(good, 100 if good else 0)})
        p = plan(o, NOW)
        assert [c.status for c in p.status.conditions if c.type == "SLAMet"] == [expected]
    Status.model_validate(p.status.model_dump(mode="json", by_alias=True))


@pytest.mark.parametrize(("share", "text"), [(None, None), (1.0, "100.00%"), (0.98754, "98.75%"), (-0.5, "-50.00%")])
def test_percent(share: float | None, text: str | None) -> None:
    assert percent(share) == text


# -- whole histories against a count of every request ----------------------------------------------------------------------------


@dataclass
class Truth:
    """Agents that serve requests, and what really became of each."""

    agents: dict[str, Load] = field(default_factory=dict)
    at: float = NOW
    seen_lost: int = 0
    good: int = 0
    total: int = 0

    def serve(self, name: str, good: int, bad: int) -> None:
        old = self.agents[name].objectives["ttft"]
        self.agents[name] = replace(
            self.agents[name], objectives={"ttft": replace(old, good=old.good + good, total=old.total + good + bad)}
        )
        self.good, self.total = self.good + good, self.total + good + bad


programs = st.lists(
    st.one_of(
        st.tuples(st.just("serve"), st.integers(0, 2), st.tuples(st.integers(0, 5), st.integers(0, 5))),
        st.tuples(st.just("restart agent"), st.integers(0, 2), st.integers(0, 4)),
        st.tuples(st.just("replace pod"), st.integers(0, 2), st.integers(0, 4)),
        st.tuples(st.just("read"), st.booleans(), st.booleans()),
    ),
    max_size=30,
)


@settings(max_examples=150, deadline=None)
@given(programs)
def test_the_ledger_equals_a_count_of_every_request(program: list[Any]) -> None:
    """Each agent is read right before it dies (what it served after that dies with it), and the operator restarts at any time."""
    truth, ledger = Truth(), Ledger()
    pods = {n: f"p{n}" for n in range(3)}
    ids = iter(range(1_000_000))

    def born(name: str) -> None:
        truth.agents[name] = load(truth.at, f"i{next(ids)}", objectives={"ttft": ObjectiveCount(0, 0, 0.5, 1)})

    def read() -> None:
        nonlocal ledger
        truth.at += 1
        answers = {name: replace(answer, at=truth.at) for name, answer in truth.agents.items()}
        views = [pod(0, name=name) for name in pods.values()]
        ledger = advance(ledger, [TTFT], views, answers, 120.0, truth.at)

    for name in pods.values():
        born(name)
    for action, n, value in program:
        if action == "serve":
            truth.serve(pods[n], *value)
        elif action == "read":
            read()
            if value:
                ledger = loads(dumps(ledger))
        else:
            name = pods[n]
            truth.agents[name] = replace(truth.agents[name], running=value)
            read()
            truth.total += value  # lost in flight: bad
            if action == "replace pod":
                truth.agents.pop(name)
                name = pods[n] = f"p{next(ids) + 10}"
            born(name)
    read()
    assert counted(ledger, now=truth.at) == (truth.good, truth.total)


# -- the ledger as text ----------------------------------------------------------------------------------------------------------

texts = st.text(st.characters(codec="utf-8"), min_size=1, max_size=8)
small = st.integers(0, 10**9)
counters = st.dictionaries(texts, st.tuples(small, small, small), max_size=3)
bases = st.builds(Base, texts, texts, st.floats(0, 2e9).map(lambda x: round(x, 3)), small, counters)
ledgers = st.builds(
    Ledger,
    st.dictionaries(texts, st.lists(st.builds(Bucket, small, st.just(60), small, small), max_size=4).map(tuple), max_size=3),
    st.lists(bases, max_size=4).map(lambda some: {base.instance_id: base for base in some}),
    st.dictionaries(texts, st.floats(0, 1e6), max_size=3),
)  # fmt: skip


@given(ledgers)
def test_text_gives_the_ledger_back(ledger: Ledger) -> None:
    again = loads(dumps(ledger))
    assert again.bases == ledger.bases and again.thresholds == ledger.thresholds
    assert {k: v for k, v in again.buckets.items() if v} == {k: v for k, v in ledger.buckets.items() if v}


nearly = ['{"v":2}', "[]", "null", '{"v":1}', '{"v":1,"deflated":"zzz"}', '{"v":1,"objectives":[1],"buckets":[],"thresholds":{}}']


@given(st.text() | st.sampled_from(nearly))
def test_garbage_is_an_error_that_says_so(text: str) -> None:
    with pytest.raises(LedgerError, match="ledger"):
        loads(text)


def test_a_thousand_pods_fit() -> None:
    rng = random.Random(1)
    names = ["ttft", "tpot", "up"]
    bases = {}
    for n in range(1000):
        instance = uuid.UUID(int=rng.getrandbits(128)).hex
        counts = {name: (rng.randrange(20), rng.randrange(10**5), rng.randrange(10**5)) for name in names}
        bases[instance] = Base(f"smollm2-7d4f9c-{n}", instance, NOW + rng.random() * 10, rng.randrange(64), counts)
    minutes = {name: tuple(Bucket(int(NOW) + 60 * i, 60, rng.randrange(10**5), rng.randrange(10**5)) for i in range(60)) for name in names}
    ledger = Ledger(minutes, bases, {"ttft": 0.5, "tpot": 0.05, "up": 0.0})
    text = dumps(ledger)
    assert len(text.encode()) <= MAX_BYTES
    assert loads(text).buckets == minutes
