"""Stop strings over bytes: an Aho–Corasick automaton, whose state is the longest suffix of the stream that may yet become one."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class StopAutomaton:
    """State 0 is the start. `depth[state]` bytes at the stream's end are a prefix of a stop string and must be held back."""

    def __init__(self, stops: Sequence[bytes]) -> None:
        self._next: list[dict[int, int]] = [{}]
        self.depth = [0]
        self._longest = [0]  # length of the longest stop string that ends in the state; 0: none
        self._fail = [0]
        for stop in stops:
            self._insert(stop)
        self._link()

    def _insert(self, stop: bytes) -> None:
        state = 0
        for byte in stop:
            if byte not in self._next[state]:
                self._next[state][byte] = len(self._next)
                self._next.append({})
                self.depth.append(self.depth[state] + 1)
                self._longest.append(0)
                self._fail.append(0)
            state = self._next[state][byte]
        self._longest[state] = len(stop)

    def _link(self) -> None:
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            # A proper suffix that is a whole stop string is shorter than one that ends here itself.
            self._longest[state] = self._longest[state] or self._longest[self._fail[state]]
            for byte, child in self._next[state].items():
                self._fail[child] = self.step(self._fail[state], byte)
                queue.append(child)

    def step(self, state: int, byte: int) -> int:
        """The state after one more byte."""
        while state and byte not in self._next[state]:
            state = self._fail[state]
        return self._next[state].get(byte, 0)

    def matched(self, state: int) -> int:
        """Length of the longest stop string that ends in the state; 0 if none does."""
        return self._longest[state]
