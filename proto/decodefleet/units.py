"""Durations such as `500ms` and Kubernetes quantities such as `4Gi`, as pydantic string types and as numbers."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, WithJsonSchema

# The digits keep any sum below the 292 years that fit into 64 bits of nanoseconds.
_DIGITS = {"ms": 10, "s": 8, "m": 6, "h": 5, "d": 4}
DURATION_PATTERN = "^(" + "|".join(rf"[0-9]{{1,{digits}}}(\.[0-9]+)?{unit}" for unit, digits in _DIGITS.items()) + ")+$"
QUANTITY_PATTERN = r"^(0*[1-9][0-9]*(\.[0-9]+)?|0+\.0*[1-9][0-9]*)(m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?$"
_MAX_LENGTH = 32

_SECONDS = {"ms": Decimal("0.001"), "s": Decimal(1), "m": Decimal(60), "h": Decimal(3600), "d": Decimal(86400)}
_FACTORS = {
    "": Decimal(1),
    "m": Decimal("0.001"),
    **{unit: Decimal(1000) ** n for n, unit in enumerate(["k", "M", "G", "T", "P"], 1)},
    **{unit: Decimal(1024) ** n for n, unit in enumerate(["Ki", "Mi", "Gi", "Ti", "Pi"], 1)},
}


def parse_duration(text: str) -> float:
    """Seconds in a duration such as `1h30m` or `500ms`. Raises ValueError."""
    if len(text) > _MAX_LENGTH or not re.fullmatch(DURATION_PATTERN, text):
        if re.fullmatch(r"([0-9]+(\.[0-9]+)?(ms|s|m|h|d))+", text):
            digits = ", ".join(f"{count} of {unit}" for unit, count in _DIGITS.items())
            raise ValueError(f"{text!r} is too long; these digits are the most: {digits}")
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
    """The number in a Kubernetes quantity, above 0: `4Gi` is 4294967296, `500m` is 0.5. Raises ValueError."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([A-Za-z]*)", str(text))
    if not match or match[2] not in _FACTORS or len(str(text)) > _MAX_LENGTH:
        raise ValueError(f"{text!r} is not a quantity; write it as 500m, 2, 512Mi or 4Gi")
    number = float(Decimal(match[1]) * _FACTORS[match[2]])
    if number <= 0:
        raise ValueError(f"{text!r} is nothing; write more than 0, or leave the field out")
    return number


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _unit_given(value: object) -> object:
    if _number(value):
        raise ValueError(f"{value} has no unit; write it as {value}s, or with ms, m, h or d")
    return value


def _checked_duration(text: str) -> str:
    parse_duration(text)
    return text


def _checked_period(text: str) -> str:
    if parse_duration(text) <= 0:
        raise ValueError(f"{text!r} is no time at all; write more than 0s")
    return text


def _quantity_text(value: object) -> object:
    if isinstance(value, float):
        raise ValueError(f"{value} is a fraction; write it in thousandths, as in 500m, or in quotes, as in \"0.5\"")
    return str(value) if _number(value) else value


def _checked_quantity(text: str) -> str:
    parse_quantity(text)
    return text


_DURATION_SCHEMA = {"type": "string", "pattern": DURATION_PATTERN, "maxLength": _MAX_LENGTH}
_SOME_TIME = {"rule": "self.matches('[1-9]')", "message": "write more than 0s"}

Duration = Annotated[str, BeforeValidator(_unit_given), AfterValidator(_checked_duration), WithJsonSchema(_DURATION_SCHEMA)]
# A duration above 0.
Period = Annotated[
    str,
    BeforeValidator(_unit_given),
    AfterValidator(_checked_period),
    WithJsonSchema(_DURATION_SCHEMA | {"x-kubernetes-validations": [_SOME_TIME]}),
]
# In the schema text or a whole number, in the types always text.
Quantity = Annotated[
    str,
    BeforeValidator(_quantity_text),
    AfterValidator(_checked_quantity),
    WithJsonSchema({"x-kubernetes-int-or-string": True, "pattern": QUANTITY_PATTERN, "maxLength": _MAX_LENGTH, "minimum": 1}),
]
