"""The operator's process: health endpoint, leader election, then the control loop until a signal or a lost lease."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from decodefleet_operator.agents import AgentClient, Sampler
from decodefleet_operator.cluster.backend import KubernetesBackend
from decodefleet_operator.cluster.client import ApiClient, load_configuration
from decodefleet_operator.cluster.health import Health, serve
from decodefleet_operator.cluster.lease import Lease, LostLease
from decodefleet_operator.controller import Controller
from decodefleet_operator.render import Profile

log = logging.getLogger(__name__)

_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_OLDEST_DUE = 60.0  # seconds that a due reconcile may wait
_LONGEST_SILENCE = 300.0  # seconds without an event or bookmark of a watch; a live server sends one a minute
_LEASE_SILENCE = 60.0


class OptionError(Exception):
    """The command line cannot be used; the message says what to change."""


@dataclass(frozen=True, slots=True)
class Options:
    """The command line of `decodefleet operator`."""

    namespace: str | None  # None: all of them
    agent_image: str
    agent_image_pull_policy: str | None
    http_port: int
    lease_namespace: str
    lease_name: str
    profiles: Mapping[str, Profile]


def own_namespace() -> str:
    """The pod's namespace, or `default` outside of a cluster."""
    return _NAMESPACE_FILE.read_text().strip() if _NAMESPACE_FILE.exists() else "default"


def read_profiles(path: str) -> dict[str, Profile]:
    """Placement profiles from YAML: name to {resource, nodeSelector, tolerations, hourlyPrice}. Raises OptionError."""
    try:
        document = yaml.safe_load(Path(path).read_text()) or {}
        return {name: _profile(name, fields or {}) for name, fields in document.items()}
    except (OSError, yaml.YAMLError, AttributeError, TypeError, ValueError) as error:
        raise OptionError(f"--placements {path}: {error}") from error


def _profile(name: str, fields: Mapping[str, object]) -> Profile:
    if unknown := fields.keys() - {"resource", "nodeSelector", "tolerations", "hourlyPrice"}:
        raise ValueError(f"{name} has unknown fields {sorted(unknown)}; there are resource, nodeSelector, tolerations and hourlyPrice")
    price = fields.get("hourlyPrice")
    return Profile(
        name=name,
        resource_name=str(fields["resource"]) if fields.get("resource") else None,
        node_selector=dict(fields.get("nodeSelector") or {}),  # type: ignore[call-overload]
        tolerations=tuple(fields.get("tolerations") or ()),  # type: ignore[arg-type]
        hourly_price=float(price) if price is not None else None,  # type: ignore[arg-type]
    )


async def run(options: Options) -> int:
    """Runs until SIGTERM or SIGINT (exit status 0) or until the lease is lost (1)."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    health = Health()
    runner, port = await serve(health, options.http_port)
    log.info("serving health and metrics", extra={"port": port})
    identity = f"{os.environ.get('POD_NAME') or socket.gethostname()}-{uuid.uuid4().hex[:8]}"
    configuration = load_configuration()
    try:
        async with ApiClient(configuration) as lease_api:
            lease = Lease(lease_api, options.lease_namespace, options.lease_name, identity)
            health.leading = lambda: lease.leading
            health.checks.append(lambda: _silent("the lease", time.monotonic() - lease.tried_at, _LEASE_SILENCE))
            try:
                async with ApiClient(configuration, may_write=lambda: lease.leading, count=health.count) as api:
                    return await _lead(options, api, lease, health, stop, identity)
            finally:
                await lease.release()
    finally:
        await runner.cleanup()


async def _lead(options: Options, api: ApiClient, lease: Lease, health: Health, stop: asyncio.Event, identity: str) -> int:
    async with asyncio.TaskGroup() as tasks:
        stopping = tasks.create_task(stop.wait())
        acquiring = tasks.create_task(lease.acquire())
        await asyncio.wait({stopping, acquiring}, return_when=asyncio.FIRST_COMPLETED)
        if not acquiring.done():
            acquiring.cancel()
            return 0
        keeping = tasks.create_task(_keep(lease))
        controlling = tasks.create_task(_control(options, api, health, identity))
        await asyncio.wait({stopping, keeping, controlling}, return_when=asyncio.FIRST_COMPLETED)
        for task in (stopping, keeping, controlling):
            task.cancel()
        return 0 if stop.is_set() else 1


async def _keep(lease: Lease) -> None:
    try:
        await lease.keep()
    except LostLease:
        log.error("the lease is lost; ending, so that two never write")


async def _control(options: Options, api: ApiClient, health: Health, identity: str) -> None:
    backend = KubernetesBackend(
        api, options.namespace, options.agent_image, options.agent_image_pull_policy, options.profiles, identity=identity
    )
    client = AgentClient()
    controller = Controller(backend, client, Sampler(backend, client))
    health.plans = controller.plans
    health.reconciles = lambda: (controller.reconciles, controller.failures)
    health.checks.append(lambda: _silent("the oldest due reconcile", controller.oldest_due(), _OLDEST_DUE))
    health.checks.append(lambda: _silent("the quietest watch", backend.heard(), _LONGEST_SILENCE))
    try:
        await controller.run()
    finally:
        await client.close()


def _silent(what: str, age: float, limit: float) -> str | None:
    return f"{what} is {age:.0f} s old; {limit:.0f} s is the limit" if age > limit else None
