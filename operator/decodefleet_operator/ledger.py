"""The SLA ledger: good and total requests per objective in time buckets, and the counters that they were taken from."""

from __future__ import annotations

import base64
import json
import zlib
from dataclasses import dataclass, field
from typing import Any

MAX_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class Bucket:
    """Requests of one objective in [start, start + width) Unix seconds."""

    start: int
    width: int
    good: int
    total: int


@dataclass(frozen=True, slots=True)
class Base:
    """The counters of one agent instance that are in the ledger already."""

    pod: str
    instance_id: str
    at: float
    in_flight: int  # counted bad if the instance is lost
    counts: dict[str, tuple[int, int, int]]  # objective -> (epoch, good, total)


@dataclass(frozen=True, slots=True)
class Ledger:
    """Written whole and in one write, so that buckets and bases never disagree. At most 64 KiB as JSON."""

    buckets: dict[str, tuple[Bucket, ...]] = field(default_factory=dict)  # by objective, oldest first
    bases: dict[str, Base] = field(default_factory=dict)  # by instance id
    thresholds: dict[str, float] = field(default_factory=dict)  # by objective; another one starts a new window


class LedgerError(ValueError):
    """The text is no ledger."""


def dumps(ledger: Ledger) -> str:
    """Compact JSON, column by column; what is still over 64 KiB is deflated inside the JSON.

    A fleet of 1,000 pods with three objectives stays under 64 KiB; a larger one grows by about 60 bytes a pod.
    """
    bases = list(ledger.bases.values())
    names = sorted({*ledger.buckets, *(name for base in bases for name in base.counts)})
    content = {
        "v": 1,
        "objectives": names,
        "thresholds": ledger.thresholds,
        "buckets": [[[b.start, b.width, b.good, b.total] for b in ledger.buckets.get(name, ())] for name in names],
        "pods": [base.pod for base in bases],
        "instances": [base.instance_id for base in bases],
        "at": (at := min((round(base.at * 1000) for base in bases), default=0)),
        "after": [round(base.at * 1000) - at for base in bases],
        "flying": [base.in_flight for base in bases],
        "counts": [[base.counts.get(name, ()) for base in bases] for name in names],
    }
    text = json.dumps(content, separators=(",", ":"))
    if len(text) <= MAX_BYTES:
        return text
    return json.dumps({"v": 1, "deflated": base64.b85encode(zlib.compress(text.encode(), 9)).decode()}, separators=(",", ":"))


def loads(text: str) -> Ledger:
    """The ledger in the text. Raises LedgerError, which says what to do, for anything that `dumps` did not write."""
    try:
        content = json.loads(text)
        if isinstance(content, dict) and "deflated" in content:
            content = json.loads(zlib.decompress(base64.b85decode(content["deflated"])))
        if content["v"] != 1:
            raise LedgerError(f"the SLA ledger has version {content['v']!r}; this operator reads version 1")
        return _ledger(content)
    except LedgerError:
        raise
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, OverflowError, RecursionError, zlib.error) as error:
        raise LedgerError(f"the SLA ledger cannot be read ({type(error).__name__}: {error}); delete it to start a new window") from error


def _ledger(content: dict[str, Any]) -> Ledger:
    names = [str(name) for name in content["objectives"]]
    buckets = {
        name: tuple(Bucket(int(start), int(width), int(good), int(total)) for start, width, good, total in rows)
        for name, rows in zip(names, content["buckets"], strict=True)
    }
    counts: list[dict[str, tuple[int, int, int]]] = [{} for _ in content["pods"]]
    for name, column in zip(names, content["counts"], strict=True):
        for of_base, entry in zip(counts, column, strict=True):
            if entry:
                epoch, good, total = entry
                of_base[name] = (int(epoch), int(good), int(total))
    bases = {}
    rows = zip(content["pods"], content["instances"], content["after"], content["flying"], counts, strict=True)
    for pod, instance, after, flying, of_base in rows:
        bases[str(instance)] = Base(str(pod), str(instance), (content["at"] + after) / 1000, int(flying), of_base)
    return Ledger(buckets, bases, {str(name): float(value) for name, value in content["thresholds"].items()})
