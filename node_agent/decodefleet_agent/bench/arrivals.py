"""When requests arrive: at random moments that a seed fixes, whatever the fleet does with them."""

from __future__ import annotations

import random
from typing import Literal

Kind = Literal["poisson", "bursty"]
KINDS: tuple[Kind, ...] = ("poisson", "bursty")
_SHAPES: dict[Kind, float] = {"poisson": 1.0, "bursty": 0.2}  # of the gamma distribution of gaps; below 1 they bunch


def arrivals(kind: Kind, rate: float, seconds: float, seed: int) -> list[float]:
    """Ascending seconds in [0, seconds), `rate` per second on average.

    Gaps are gamma-distributed: with shape 1 that is a Poisson process; with shape 0.2 their standard deviation is 2.2 times their mean.
    """
    shape = _SHAPES[kind]
    source = random.Random(seed)
    times: list[float] = []
    now = source.gammavariate(shape, 1 / (rate * shape))
    while now < seconds:
        times.append(now)
        now += source.gammavariate(shape, 1 / (rate * shape))
    return times
