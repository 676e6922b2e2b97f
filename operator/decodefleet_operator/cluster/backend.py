"""The Kubernetes backend: caches of resources, pods and children in memory, and the plan made true by writes that can be repeated."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from decodefleet_operator.backend import Known
from decodefleet_operator.cluster.apply import apply_plan
from decodefleet_operator.cluster.client import ApiClient, object_path
from decodefleet_operator.cluster.fleet import Fleet, current_revision
from decodefleet_operator.cluster.kopf_watch import Watch
from decodefleet_operator.cluster.objects import SELECTOR, endpoint
from decodefleet_operator.cluster.prepare import prepare_fleet
from decodefleet_operator.cluster.reflector import IDLE, Reflector
from decodefleet_operator.cluster.resources import Resources
from decodefleet_operator.cluster.views import ChildView, OwnedPod, RevisionView, child_view, owned_pod, revision_view
from decodefleet_operator.observation import Key, PodView
from decodefleet_operator.planning import Plan
from decodefleet_operator.render import Profile

log = logging.getLogger(__name__)


class KubernetesBackend:
    """Implements `Backend`. All methods belong to one event loop."""

    def __init__(
        self,
        api: ApiClient,
        namespace: str | None,
        image: str,
        pull_policy: str | None = None,
        profiles: Mapping[str, Profile] | None = None,
        identity: str = "decodefleet-operator",
        clock: Callable[[], float] = time.time,
        idle: float = IDLE,
    ) -> None:
        self.api = api
        self.image = image
        self.pull_policy = pull_policy
        self.profiles = profiles or {}
        self._gpu_profiles = frozenset(name for name, profile in self.profiles.items() if profile.resource_name)
        self.identity = identity
        self.clock = clock
        self._wake: Callable[[Key], None] = lambda key: None
        self._fleets: dict[Key, Fleet] = {}
        self._known: dict[Key, Known] = {}
        self._pods: dict[Key, dict[str, OwnedPod]] = {}
        self._revisions: dict[Key, dict[str, RevisionView]] = {}
        self.resources = Resources(self.changed)
        self._watch = Watch(api, self.resources, namespace)

        def path(api_version: str, plural: str) -> str:
            return object_path(api_version, plural, namespace)

        self.pods = Reflector(api, path("v1", "pods"), SELECTOR, owned_pod, self._pod_changed, idle=idle)
        self.revisions = Reflector(
            api, path("apps/v1", "controllerrevisions"), SELECTOR, revision_view, self._revision_changed, metadata_only=True, idle=idle
        )
        self.services = Reflector(api, path("v1", "services"), SELECTOR, child_view, self._child_changed, metadata_only=True, idle=idle)
        self.budgets = Reflector(
            api, path("policy/v1", "poddisruptionbudgets"), SELECTOR, child_view, self._child_changed, metadata_only=True, idle=idle
        )

    # -- Backend -----------------------------------------------------------------------------------------------------------------

    async def run(self, wake: Callable[[Key], None]) -> None:
        self._wake = wake
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._watch.run(), name="watch resources")
            for reflector in self._reflectors():
                tasks.create_task(reflector.run(), name="watch objects")

    async def synced(self) -> None:
        await self._watch.seeded.wait()
        for reflector in self._reflectors():
            await reflector.synced.wait()

    def keys(self) -> Iterable[Key]:
        return [key for key in self.resources if self.known(key) is not None]

    def known(self, key: Key) -> Known | None:
        if key not in self._known:
            known = self._assemble(key)
            if known is None:
                return None
            self._known[key] = known
        return self._known[key]

    async def prepare(self, key: Key) -> None:
        known = self.known(key)
        if known is not None:
            await prepare_fleet(self, known, self.fleet(known))

    async def apply(self, key: Key, plan: Plan) -> None:
        known = self.known(key)
        if known is not None:
            await apply_plan(self, known, self.fleet(known), plan)

    # -- for prepare and apply -----------------------------------------------------------------------------------------------------

    def fleet(self, known: Known) -> Fleet:
        metadata = known.resource.metadata
        return self._fleets[Key(metadata.namespace, metadata.name)]

    def changed(self, key: Key) -> None:
        """What is in memory of the resource changed: it is to be looked at again."""
        self._known.pop(key, None)
        parsed = self.resources.get(key)
        fleet = self._fleets.get(key)
        if fleet is not None and (parsed is None or parsed.resource.metadata.uid != fleet.uid):
            del self._fleets[key]
        self._wake(key)

    def refresh(self, key: Key) -> None:
        """As `changed`, for changes that the running reconcile itself made."""
        self._known.pop(key, None)

    def heard(self) -> float:
        """Seconds since the quietest of the watches heard anything; kopf's own is quiet where nothing changes."""
        return max(time.monotonic() - reflector.heard_at for reflector in self._reflectors())

    # ------------------------------------------------------------------------------------------------------------------------------

    def _reflectors(self) -> tuple[Reflector[OwnedPod], Reflector[RevisionView], Reflector[ChildView], Reflector[ChildView]]:
        return (self.pods, self.revisions, self.services, self.budgets)

    def _assemble(self, key: Key) -> Known | None:
        parsed = self.resources.get(key)
        if parsed is None or parsed.deleted:
            return None
        resource = parsed.resource
        fleet = self._fleets.setdefault(key, Fleet(resource.metadata.uid))
        pods = [self._view(pod, resource.metadata.uid) for pod in self._pods.get(key, {}).values()]
        return Known(
            resource=resource,
            revision=current_revision(resource, self._revisions.get(key, {}).values(), self.image),
            pods=tuple(sorted(pods, key=lambda pod: (pod.created_at, pod.name))),
            ledger=fleet.ledger,
            control_token=fleet.token,
            replicas_writer=parsed.replicas_writer,
            endpoint=endpoint(key),
            error=parsed.error,
            warnings=fleet.warnings,
            gpu_profiles=self._gpu_profiles,
        )

    def _view(self, pod: OwnedPod, uid: str) -> PodView:
        """A pod of a deleted resource of the same name, or of somebody else, only holds its name: it is shown as terminating."""
        return pod.view if pod.owner == uid else replace(pod.view, deleted_at=pod.view.deleted_at or pod.view.created_at)

    def _pod_changed(self, name: Key, old: OwnedPod | None, new: OwnedPod | None) -> None:
        if old is not None and (new is None or new.fleet != old.fleet):
            self._pods[old.fleet].pop(name.name)
            self.changed(old.fleet)
        if new is not None:
            self._pods.setdefault(new.fleet, {})[name.name] = new
            same = old is not None and replace(old, view=replace(old.view, resource_version=new.view.resource_version)) == new
            (self.refresh if same else self.changed)(new.fleet)

    def _revision_changed(self, name: Key, old: RevisionView | None, new: RevisionView | None) -> None:
        for key in {view.fleet for view in (old, new) if view is not None}:
            stored = self._revisions.setdefault(key, {})
            stored.pop(name.name, None)
            if new is not None and new.fleet == key:
                stored[name.name] = new
            elif old is not None and key in self._fleets:
                self._fleets[key].renderings.pop(old.revision, None)
            self.changed(key)

    def _child_changed(self, name: Key, old: ChildView | None, new: ChildView | None) -> None:
        if old is not None and new is None:
            self.changed(old.fleet)
