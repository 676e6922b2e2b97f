"""What the fleet costs. A price that is not known makes the cost unknown, not zero."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from decodefleet_operator.api import CostStatus, Placement
from decodefleet_operator.observation import PodView


def per_hour(pods: Iterable[PodView], placements: Sequence[Placement]) -> float | None:
    """The sum of the pods' hourly prices; None where one is unknown or there is no price at all."""
    prices = {placement.profile: placement.hourly_price for placement in placements if placement.hourly_price is not None}
    total = 0.0
    for pod in pods:
        price = prices.get(pod.placement) if pod.placement is not None else None
        if price is None:
            return None
        total += price
    return total if prices else None


def affordable(placements: Sequence[Placement], budget: float) -> int | None:
    """The most replicas that `budget` per hour pays for when placements fill in their order; None where a price that matters is unknown."""
    count = 0
    for placement in placements:
        price = placement.hourly_price
        if price is None:
            return None
        fits = 10_000 if price == 0 else int(budget / price + 1e-9)
        if placement.max_replicas is None or fits < placement.max_replicas:
            return count + fits
        count += placement.max_replicas
        budget -= placement.max_replicas * price
    return count if placements else None


def cost_status(hourly: float | None, tokens_per_second: float | None, currency: str) -> CostStatus | None:
    """Cost per hour, and per million generated tokens at the present rate; None where the first is unknown."""
    if hourly is None:
        return None
    each = f"{hourly / (tokens_per_second * 3600) * 1e6:.2f} {currency}" if tokens_per_second else None
    return CostStatus(per_hour=f"{hourly:.2f} {currency}", per_million_tokens=each)
