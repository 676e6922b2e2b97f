"""What a benchmark found: the JSON's shape, and what follows from the figures."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from decodefleet_agent.bench.catalog import OURS
from decodefleet_agent.bench.statistics import Spread


@dataclass(frozen=True)
class Result:
    """One engine at one batch and context. Figures are medians over the rounds, None where the engine failed (`error` says how).

    Seconds and bytes; `tokens_per_second` counts decoding alone, all sequences together; `context` is the prompt's tokens; `perplexity` is
    that of the format that ran; `floor_tokens_per_second` would be the rate if a step were its matrix products alone.
    """

    engine: str
    version: str
    format: str
    detail: str
    threads: int
    batch: int
    context: int
    new_tokens: int
    tokens_per_second: float | None = None
    tokens_per_second_low: float | None = None
    tokens_per_second_high: float | None = None
    prefill_tokens_per_second: float | None = None
    time_to_first_token: float | None = None
    time_per_output_token: float | None = None
    peak_memory: int | None = None
    perplexity: float | None = None
    floor_tokens_per_second: float | None = None
    error: str | None = None


@dataclass(frozen=True)
class Absent:
    """A peer that was asked for and is not installed."""

    engine: str
    how_to_get: str


@dataclass(frozen=True)
class Report:
    """A whole run. `machine` is the processor and the cores that the run might use."""

    model: str
    machine: str
    rounds: int
    perplexity_tokens: int
    results: tuple[Result, ...]
    absent: tuple[Absent, ...]

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2)


@dataclass(frozen=True)
class Comparison:
    """Our rate divided by a peer's, at one batch and context."""

    ours: Result
    peer: Result
    ratio: float


def measured(result: Result, rates: Spread, first: Spread, per_token: Spread, peak: int) -> Result:
    """The result with the figures of its rounds."""
    return replace(
        result,
        tokens_per_second=rates.median,
        tokens_per_second_low=rates.low,
        tokens_per_second_high=rates.high,
        prefill_tokens_per_second=result.batch * result.context / first.median,
        time_to_first_token=first.median,
        time_per_output_token=per_token.median,
        peak_memory=peak,
    )


def points(results: tuple[Result, ...]) -> list[tuple[int, int]]:
    """The (batch, context) pairs in the order in which they ran."""
    return list(dict.fromkeys((result.batch, result.context) for result in results))


def at(results: tuple[Result, ...], point: tuple[int, int]) -> list[Result]:
    """The results of one point, the fastest first; those that failed last."""
    return sorted((r for r in results if (r.batch, r.context) == point), key=lambda r: -(r.tokens_per_second or 0))


def best_peer(results: list[Result]) -> Result | None:
    """The fastest one."""
    peers = [r for r in results if r.engine != OURS.name and r.tokens_per_second]
    return max(peers, key=lambda r: r.tokens_per_second or 0, default=None)


def no_worse(peer: Result, ours: Result) -> bool:
    """Whether the peer's perplexity is equal or better; a thousandth is no difference. If it is unknown: whether it runs our format."""
    if peer.perplexity is None or ours.perplexity is None:
        return peer.format == ours.format
    return peer.perplexity <= ours.perplexity * 1.001


def comparisons(results: list[Result]) -> tuple[Comparison | None, Comparison | None]:
    """Ours against the fastest peer of equal or better perplexity, and against the fastest of all; None where one is missing."""
    ours = next((r for r in results if r.engine == OURS.name and r.tokens_per_second), None)

    def compare(peer: Result | None) -> Comparison | None:
        if ours is None or peer is None:
            return None
        assert ours.tokens_per_second and peer.tokens_per_second
        return Comparison(ours, peer, ours.tokens_per_second / peer.tokens_per_second)

    equal = [r for r in results if ours is not None and no_worse(r, ours)]
    return compare(best_peer(equal)), compare(best_peer(results))


def machine() -> str:
    """Such as `AMD EPYC, 2 cores, avx2`."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    flags = fields.get("flags", "").split()
    known = [flag for flag in ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8") if flag in flags]
    cores = len(os.sched_getaffinity(0))
    return ", ".join([fields.get("model name") or platform.machine(), f"{cores} cores", *known])
