"""Events of a local fleet: the last ones, equal ones counted, in a file."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from decodefleet_operator.local import home
from decodefleet_operator.planning import Event

MOST = 200


class Events:
    """Events as Kubernetes aggregates them: type, reason, message, count, first and last time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._items: list[dict[str, str | int]] = []

    def add(self, events: Iterable[Event]) -> None:
        """Appends and writes; an event that was seen before counts up and becomes the newest."""
        new = list(events)
        for event in new:
            same = {"type": event.type, "reason": event.reason, "message": event.message}
            seen = next((item for item in self._items if same.items() <= item.items()), None)
            if seen is not None:
                self._items.remove(seen)
            item = {
                **same,
                "count": int(seen["count"]) + 1 if seen else 1,
                "first": seen["first"] if seen else home.now(),
                "last": home.now(),
            }
            self._items = [*self._items, item][-MOST:]
        if new:
            home.write(self._path, self._items)
