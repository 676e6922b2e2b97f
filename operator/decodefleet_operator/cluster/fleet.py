"""What the backend has in memory of one fleet, and which revision its spec means."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from decodefleet_operator import conditions
from decodefleet_operator.api import DecoderDeployment, Status, UpgradePolicy
from decodefleet_operator.cluster.client import Object
from decodefleet_operator.cluster.views import RevisionView
from decodefleet_operator.ledger import Ledger
from decodefleet_operator.render import revision, spec_hash

Warnings = tuple[tuple[str, str], ...]


@dataclass(slots=True)
class Fleet:
    """Of one resource; another one of the same name gets a new Fleet."""

    uid: str
    token: str | None = None
    ledger: Ledger | None = None
    ledger_written: tuple[str, float] | None = None  # text and time of the last write, or what was read
    status_written: tuple[Status, float] | None = None
    renderings: dict[str, Object] = field(default_factory=dict)  # revision -> what its ControllerRevision stores
    rejected_children: dict[str, str] = field(default_factory=dict)  # plural -> the API server's message
    rejected_pods: str | None = None
    ensured_at: float | None = None  # when Service and PDB were last applied
    told: dict[tuple[str, str], float] = field(default_factory=dict)  # event -> when it was posted

    @property
    def warnings(self) -> Warnings:
        pods = [(conditions.POD_REJECTED, f"a pod was refused: {self.rejected_pods}")] if self.rejected_pods else []
        children = [(conditions.OBJECT_REJECTED, f"{what} was refused: {why}") for what, why in sorted(self.rejected_children.items())]
        return (*pods, *children)


def current_revision(resource: DecoderDeployment, stored: Iterable[RevisionView], default_image: str) -> str:
    """The revision that the spec means.

    A spec without an image keeps the one that it resolved to first, which is in a stored revision of the same spec, so that an operator
    with another default restarts nothing.
    """
    spec = resource.spec
    if spec.image is None and spec.rollout.upgrade_policy == UpgradePolicy.OnSpecChange:
        wanted = spec_hash(spec)
        same = [r for r in stored if r.owner == resource.metadata.uid and r.spec_hash == wanted and r.revision]
        now = resource.status.revision if resource.status else None
        if same:
            return max(same, key=lambda r: (r.revision == now, r.created_at, r.revision)).revision
    return revision(spec, spec.image or default_image)
