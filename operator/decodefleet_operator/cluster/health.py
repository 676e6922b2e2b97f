"""/healthz and /metrics of the operator."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from decodefleet_operator.observation import Key
from decodefleet_operator.planning import Plan

Check = Callable[[], str | None]  # what is wrong, for a person; None where nothing is


@dataclass(slots=True)
class Health:
    """What the endpoints show. The process adds checks and gauges as its parts start."""

    checks: list[Check] = field(default_factory=list)
    plans: Callable[[], Mapping[Key, Plan]] = dict
    leading: Callable[[], bool] = lambda: False
    reconciles: Callable[[], tuple[int, int]] = lambda: (0, 0)  # done, failed
    registry: CollectorRegistry = field(default_factory=lambda: CollectorRegistry(auto_describe=False))
    requests: Counter = field(init=False)

    def __post_init__(self) -> None:
        self.requests = Counter("decodefleet_api_requests", "Answers of the API server.", ["verb", "code"], registry=self.registry)
        self.registry.register(_Fleets(self))

    def count(self, verb: str, status: int) -> None:
        self.requests.labels(verb, str(status)).inc()

    def problems(self) -> list[str]:
        return [problem for check in self.checks if (problem := check()) is not None]


class _Fleets(Collector):
    """The last plan of each resource as gauges, so that KEDA or an HPA can act on a decision."""

    def __init__(self, health: Health) -> None:
        self._health = health

    def collect(self) -> Iterable[Metric]:
        plans = self._health.plans()
        yield from _gauges(plans)
        leading = GaugeMetricFamily("decodefleet_operator_leading", "1 where this operator writes, 0 where it stands by.")
        leading.add_metric([], float(self._health.leading()))
        yield leading
        done, failed = self._health.reconciles()
        outcomes = GaugeMetricFamily("decodefleet_operator_reconciles", "Reconciles since start.", labels=["result"])
        outcomes.add_metric(["done"], done)
        outcomes.add_metric(["failed"], failed)
        yield outcomes


def _gauges(plans: Mapping[Key, Plan]) -> Iterable[Metric]:
    labels = ["namespace", "name"]
    desired = GaugeMetricFamily("decodefleet_desired_replicas", "Replicas that the autoscaler decided.", labels=labels)
    replicas = GaugeMetricFamily("decodefleet_replicas", "Pods that exist and do not leave.", labels=labels)
    ready = GaugeMetricFamily("decodefleet_ready_replicas", "Of those, the ready ones.", labels=labels)
    rate = GaugeMetricFamily("decodefleet_generated_tokens_per_second", "Tokens that the fleet generates.", labels=labels)
    attainment = GaugeMetricFamily("decodefleet_sla_attainment_ratio", "Share of good requests.", labels=[*labels, "objective"])
    budget = GaugeMetricFamily("decodefleet_sla_error_budget_remaining_ratio", "Share of the budget left.", labels=[*labels, "objective"])
    burn = GaugeMetricFamily("decodefleet_sla_burn_rate", "Speed at which the budget is spent.", labels=[*labels, "objective"])
    conditions = GaugeMetricFamily("decodefleet_condition", "1 for the status that a condition has.", labels=[*labels, "type", "status"])
    for key, plan in plans.items():
        status, names = plan.status, [key.namespace, key.name]
        if status.autoscaling is not None:
            _add(desired, names, status.autoscaling.desired)
        _add(replicas, names, status.replicas)
        _add(ready, names, status.ready_replicas)
        _add(rate, names, status.tokens_per_second)
        for objective in status.sla.objectives if status.sla else ():
            _add(attainment, [*names, objective.name], _share(objective.attainment))
            _add(budget, [*names, objective.name], _share(objective.error_budget_remaining))
            _add(burn, [*names, objective.name], objective.burn_rate)
        for condition in status.conditions:
            _add(conditions, [*names, condition.type, condition.status], 1)
    return (desired, replicas, ready, rate, attainment, budget, burn, conditions)


def _add(family: GaugeMetricFamily, labels: list[str], value: float | None) -> None:
    """What is not known is absent."""
    if value is not None:
        family.add_metric(labels, value)


def _share(text: str | None) -> float | None:
    """0.993 of `99.3%`."""
    return float(text.removesuffix("%")) / 100 if text else None


async def serve(health: Health, port: int, host: str = "0.0.0.0") -> tuple[web.AppRunner, int]:
    """Starts the endpoints; the caller cleans the runner up. Returns it and the port, drawn where it was 0."""

    async def healthz(_: web.Request) -> web.Response:
        problems = health.problems()
        return web.Response(status=503 if problems else 200, text="\n".join(problems) or "ok")

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=generate_latest(health.registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    application = web.Application()
    application.add_routes([web.get("/healthz", healthz), web.get("/metrics", metrics)])
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, host, port)
    await site.start()
    return runner, runner.addresses[0][1]
