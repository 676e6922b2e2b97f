"""Medians, spreads and percentiles."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Spread:
    """Median, smallest and largest of some rounds."""

    median: float
    low: float
    high: float


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which this share in [0, 1] of the values lies, interpolated linearly. Raises ValueError if there are none."""
    if not values:
        raise ValueError("there are no values to take a percentile of")
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def spread(values: Sequence[float]) -> Spread:
    """Raises ValueError if there are no values."""
    return Spread(percentile(values, 0.5), min(values), max(values))


def perplexity(logprobs: Sequence[float]) -> float:
    """exp of the mean negative log-probability per token. Raises ValueError if there are none."""
    if not logprobs:
        raise ValueError("there are no log-probabilities to take a perplexity of")
    return math.exp(-math.fsum(logprobs) / len(logprobs))
