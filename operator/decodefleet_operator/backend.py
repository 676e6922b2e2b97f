"""What a reconcile stands on: Kubernetes, or the processes of one machine."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from decodefleet_operator.api import DecoderDeployment
from decodefleet_operator.ledger import Ledger
from decodefleet_operator.observation import Key, PodView, ReplicasWriter
from decodefleet_operator.planning import Plan


@dataclass(frozen=True, slots=True)
class Known:
    """What a backend has in memory of one resource."""

    resource: DecoderDeployment
    revision: str
    pods: tuple[PodView, ...]
    ledger: Ledger | None  # None until it was read
    control_token: str | None  # None until the fleet's token was read or made
    replicas_writer: ReplicasWriter | None = None
    endpoint: str | None = None
    error: str | None = None  # the resource is malformed; `resource` is its last good form or a minimal stand-in
    warnings: tuple[tuple[str, str], ...] = ()
    gpu_profiles: frozenset[str] = frozenset()  # placement profiles whose pods ask for a GPU


class Backend(Protocol):
    """Implemented by `kubernetes` and `local`."""

    async def run(self, wake: Callable[[Key], None]) -> None:
        """Watches resources and pods, calls `wake` for each change; returns when cancelled. Survives any outage."""

    async def synced(self) -> None:
        """Returns once resources and pods were listed; no reconcile runs before."""

    def keys(self) -> Iterable[Key]:
        """The resources that exist."""

    def known(self, key: Key) -> Known | None:
        """From memory, without I/O. None: the resource is gone or is being deleted."""

    async def prepare(self, key: Key) -> None:
        """Reads or makes what a reconcile needs but memory lacks: the fleet's token, the ledger, the revision. Idempotent."""

    async def apply(self, key: Key, plan: Plan) -> None:
        """Makes the plan true. May be cut off between any two writes; calling again with a new plan goes on from there."""
