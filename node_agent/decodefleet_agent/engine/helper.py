"""A thread beside the engine's loop: what it does costs the backend no time."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable


class Helper:
    """Runs one function at a time: between `start` and `wait`, while the caller is in native code that holds no lock of Python's."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None  # engines that are never told beside need none

    def start(self, work: Callable[[], object]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="helper", daemon=True)
            self._thread.start()
        self._work.put(work)

    def wait(self) -> None:
        """Raises what the function raised."""
        if (failure := self._done.get()) is not None:
            raise failure

    def _serve(self) -> None:
        while True:
            work = self._work.get()
            try:
                work()
            except BaseException as failure:
                self._done.put(failure)
            else:
                self._done.put(None)
