"""Durations such as `500ms` and Kubernetes quantities such as `4Gi`, as pydantic string types and as numbers."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Annotated

from pydantic import AfterValidator, WithJsonSchema

DURATION_PATTERN = r"^([0-9]+(\.[0-9]+)?(ms|s|m|h|d))+$"
QUANTITY_PATTERN = r"^[0-9]+(\.[0-9]+)?(m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?$"

_SECONDS = {"ms": Decimal("0.001"), "s": Decimal(1), "m": Decimal(60), "h": Decimal(3600), "d": Decimal(86400)}
_FACTORS = {
    "": Decimal(1),
    "m": Decimal("0.001"),
    **{unit: Decimal(1000) ** n for n, unit in enumerate(["k", "M", "G", "T", "P"], 1)},
    **{unit: Decimal(1024) ** n for n, unit in enumerate(["Ki", "Mi", "Gi", "Ti", "Pi"], 1)},
}


def parse_duration(text: str) -> float:
    """Seconds in a duration such as `1h30m` or `500ms`. Raises ValueError."""
    if len(text) > 32 or not re.fullmatch(DURATION_PATTERN, text):
        raise ValueError(f"{text!r} is not a duration; write it as 500ms, 30s, 5m or 1h30m")
    parts = re.findall(r"([0-9]+(?:\.[0-9]+)?)(ms|s|m|h|d)", text)
    return float(sum(Decimal(number) * _SECONDS[unit] for number, unit in parts))


def format_duration(seconds: float) -> str:
    """The shortest duration that means the seconds, to the millisecond: 0.5 is `500ms`, 90 is `90s`, 3600 is `1h`."""
    milliseconds = round(seconds * 1000)
    for unit, size in (("h", 3_600_000), ("m", 60_000), ("s", 1000)):
        if milliseconds and milliseconds % size == 0 and (unit != "m" or milliseconds >= 300_000):
            return f"{milliseconds // size}{unit}"
    return f"{milliseconds}ms" if milliseconds else "0s"


def parse_quantity(text: str | int) -> float:
    """The number in a Kubernetes quantity: `4Gi` is 4294967296, `500m` is 0.5. Raises ValueError."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([A-Za-z]*)", str(text))
    if not match or match[2] not in _FACTORS:
        raise ValueError(f"{text!r} is not a quantity; write it as 500m, 2, 512Mi or 4Gi")
    return float(Decimal(match[1]) * _FACTORS[match[2]])


def _checked_duration(text: str) -> str:
    parse_duration(text)
    return text


def _checked_quantity(text: str | int) -> str:
    parse_quantity(text)
    return str(text)


Duration = Annotated[
    str,
    AfterValidator(_checked_duration),
    WithJsonSchema({"type": "string", "pattern": DURATION_PATTERN, "maxLength": 32}),
]
Quantity = Annotated[
    str | int,
    AfterValidator(_checked_quantity),
    WithJsonSchema({"x-kubernetes-int-or-string": True, "pattern": QUANTITY_PATTERN, "maxLength": 32}),
]
