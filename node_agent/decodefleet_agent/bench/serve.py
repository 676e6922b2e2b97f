"""Load on a running fleet: requests arrive when the clock says, not when the fleet is free, and each is judged by the objectives."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import grpc

from decodefleet.client import AsyncClient, Result, build_request
from decodefleet_agent.bench.statistics import percentile

_REJECTED = (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE)
SHARES = (0.5, 0.9, 0.95, 0.99)


@dataclass(frozen=True)
class Load:
    """`times`: seconds after the start at which requests arrive; `prompts` are taken in turn. `timeout` bounds each request, in seconds."""

    target: str
    times: Sequence[float]
    prompts: Sequence[str]
    output_tokens: int
    timeout: float


@dataclass(frozen=True)
class Objectives:
    """Seconds, or None for what does not matter."""

    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None


@dataclass(frozen=True)
class Request:
    """One request. Times are in seconds from its due arrival, so that a lagging client flatters no fleet. `error`: gRPC's code."""

    due: float
    lag: float  # how much later than due it was sent
    ttft: float | None = None
    tpot: float | None = None  # None too for an answer of one token
    e2e: float | None = None
    tokens: int = 0
    retries: int = 0
    error: str | None = None


@dataclass(frozen=True)
class Percentiles:
    p50: float
    p90: float
    p95: float
    p99: float


@dataclass(frozen=True)
class Summary:
    """Of all requests. Rejected and failed ones are bad; latencies are of those that were answered. Seconds."""

    sent: int
    answered: int
    rejected: int
    failed: int
    seconds: float
    tokens_per_second: float
    ttft: Percentiles | None
    tpot: Percentiles | None
    e2e: Percentiles | None
    good: int
    goodput: float  # good requests per second
    attainment: float  # good / sent
    largest_lag: float
    retries: int
    errors: dict[str, int]


async def drive(load: Load, tell: Callable[[int, int], None] = lambda done, total: None) -> tuple[list[Request], float]:
    """All requests in order of arrival, and the seconds from the start to the last answer. Raises grpc.RpcError if no fleet is there."""
    async with AsyncClient(load.target) as client:
        await client.model(timeout=load.timeout)
        began = time.monotonic()
        done = 0

        async def one(number: int, due: float) -> Request:
            nonlocal done
            await asyncio.sleep(began + due - time.monotonic())
            request = await _send(client, load.prompts[number % len(load.prompts)], load, began, due)
            done += 1
            tell(done, len(load.times))
            return request

        requests = await asyncio.gather(*(one(number, due) for number, due in enumerate(load.times)))
        return list(requests), time.monotonic() - began


async def _send(client: AsyncClient, prompt: str, load: Load, began: float, due: float) -> Request:
    arrival = began + due
    lag = time.monotonic() - arrival
    result = Result()
    first = last = None
    try:
        request = build_request(prompt, max_tokens=load.output_tokens, ignore_eos=True)
        async for response in client.stream(request, timeout=load.timeout, result=result):
            if any(delta.token_ids for delta in response.deltas):
                last = time.monotonic()
                first = first or last
    except grpc.RpcError as error:
        return Request(due, lag, retries=result.retries, error=error.code().name)
    tokens = len(result.token_ids[0]) if result.token_ids else 0
    if first is None or last is None:
        return Request(due, lag, retries=result.retries, error="NO_TOKENS")
    tpot = (last - first) / (tokens - 1) if tokens > 1 else None
    return Request(due, lag, first - arrival, tpot, last - arrival, tokens, result.retries)


def good(request: Request, objectives: Objectives) -> bool:
    """Answered, and within every objective that applies to it."""
    if request.error:
        return False
    pairs = ((request.ttft, objectives.ttft), (request.tpot, objectives.tpot), (request.e2e, objectives.e2e))
    return all(value is None or limit is None or value <= limit for value, limit in pairs)


def summarize(requests: Sequence[Request], seconds: float, objectives: Objectives) -> Summary:
    """`seconds` is how long all of it took."""
    answered = [request for request in requests if not request.error]
    errors: dict[str, int] = {}
    for request in requests:
        if request.error:
            errors[request.error] = errors.get(request.error, 0) + 1
    rejected = sum(errors.get(code.name, 0) for code in _REJECTED)
    met = sum(good(request, objectives) for request in requests)
    return Summary(
        sent=len(requests),
        answered=len(answered),
        rejected=rejected,
        failed=len(requests) - len(answered) - rejected,
        seconds=seconds,
        tokens_per_second=sum(request.tokens for request in answered) / seconds,
        ttft=_percentiles([r.ttft for r in answered if r.ttft is not None]),
        tpot=_percentiles([r.tpot for r in answered if r.tpot is not None]),
        e2e=_percentiles([r.e2e for r in answered if r.e2e is not None]),
        good=met,
        goodput=met / seconds,
        attainment=met / len(requests) if requests else 0.0,
        largest_lag=max((request.lag for request in requests), default=0.0),
        retries=sum(request.retries for request in requests),
        errors=errors,
    )


def _percentiles(values: Sequence[float]) -> Percentiles | None:
    return Percentiles(*(percentile(values, share) for share in SHARES)) if values else None
