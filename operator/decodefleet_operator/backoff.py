"""How long to wait before pods that ended are replaced again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from decodefleet_operator.observation import Failure, PodView

REMEMBERED = 600.0  # seconds
FIRST = 10.0
LONGEST = 300.0


def remember(failures: Sequence[Failure], ended: Iterable[PodView], now: float) -> tuple[Failure, ...]:
    """The failures of the last ten minutes, each pod once."""
    known = {failure.uid for failure in failures}
    new = [Failure(now, pod.uid, pod.revision, pod.problem or f"{pod.phase} without a message") for pod in ended if pod.uid not in known]
    return tuple(failure for failure in (*failures, *new) if 0 <= now - failure.at < REMEMBERED)[-256:]


def until(failures: Sequence[Failure], revision: str, wanted: int) -> float:
    """The time before which no pod of the revision is created; 0 where there is none.

    The first failure of each replica is replaced at once. With N wanted and f failures there were r = (f - 1) // N rounds beyond that,
    and the wait after the last failure is 10 s · 2^(r - 1), at most 300 s. A new revision starts anew.
    """
    of_it = [failure.at for failure in failures if failure.revision == revision]
    rounds = (len(of_it) - 1) // max(1, wanted)
    return max(of_it) + min(LONGEST, FIRST * 2 ** (rounds - 1)) if of_it and rounds > 0 else 0.0
