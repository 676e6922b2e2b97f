"""`decodefleet up`: claims the fleet, starts its supervisor, and shows how it comes up."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator

from decodefleet_operator.api import DecoderDeployment
from decodefleet_operator.local import home, manifest
from decodefleet_operator.local.backend import REPLICAS_MANAGER, REPLICAS_WRITTEN_AT
from decodefleet_operator.local.display import Display, display
from decodefleet_operator.local.home import Fleet, FleetError, Json
from decodefleet_operator.local.watch import Snapshot, look

POLL = 0.1
MANAGER = "decodefleet-up"
EXIT_TIMEOUT = 10.0  # seconds for a supervisor of a fleet that did not start


def run(args: argparse.Namespace) -> int:
    resource = manifest.read(args.file)
    if resource.spec.model.uri.startswith("pvc://"):
        raise manifest.ManifestError(f"{args.file}: spec.model.uri: pvc:// needs a cluster; here use file:///path/to/the/model")
    fleet = home.fleet(resource.metadata.name)
    try:
        lock = home.claim(fleet)
    except home.RunningAlready:
        return _apply(fleet, resource, args)
    try:
        home.write(fleet.resource, _new(resource))
        supervisor = _start(fleet, args.host, args.port, lock, tied=not args.detach)
    except BaseException:
        home.remove(fleet)
        raise
    finally:
        os.close(lock)  # the supervisor has its copy
    with _signals() as asked, display(fleet.name, resource.spec.model.uri, detached=args.detach) as screen:
        return _accompany(fleet, supervisor, args, screen, asked)


def _accompany(fleet: Fleet, supervisor: subprocess.Popen[bytes], args: argparse.Namespace, screen: Display, asked: list[int]) -> int:
    """Shows the fleet until it is ready, or, in the foreground, until it has stopped. Returns the exit status."""
    began, was_ready, told = time.monotonic(), False, 0
    while True:
        snapshot = look(fleet)
        code = supervisor.poll()
        if code is not None:
            status = _ended(fleet, code, snapshot, screen)
            return 130 if asked and args.detach else status or int(args.detach)  # nothing runs, which is not what --detach asked for
        if len(asked) > told:
            told = len(asked)
            supervisor.send_signal(signal.SIGTERM)
        failure = None if was_ready or told else snapshot.failure
        if failure is None and not was_ready and not told and args.timeout is not None and time.monotonic() - began > args.timeout:
            failure = f"it was not ready after {args.timeout:g} seconds"
        if failure is not None:
            return _give_up(fleet, supervisor, failure, screen)
        if snapshot.ready and not was_ready:
            was_ready = True
            screen.ready(snapshot, time.monotonic() - began)
            if args.detach:
                return 0
        screen.show(snapshot, stopping=bool(told))
        time.sleep(POLL)


def _ended(fleet: Fleet, code: int, snapshot: Snapshot, screen: Display) -> int:
    if code == 0:
        screen.stopped()
        return 0
    message = snapshot.info.get("error") or f"its supervisor ended with {code}"
    screen.failed(message, _tail(fleet) if not snapshot.info.get("error") else "")
    home.clear_if_dead(fleet)
    return 1


def _give_up(fleet: Fleet, supervisor: subprocess.Popen[bytes], failure: str, screen: Display) -> int:
    """Ends a fleet that cannot start, and says why."""
    home.write(fleet.stop, {"timeout": 0})
    supervisor.send_signal(signal.SIGTERM)
    try:
        supervisor.wait(EXIT_TIMEOUT)
    except subprocess.TimeoutExpired:
        supervisor.kill()  # the kernel ends its agents with it
        supervisor.wait()
    home.clear_if_dead(fleet)
    screen.failed(failure)
    return 1


def _apply(fleet: Fleet, resource: DecoderDeployment, args: argparse.Namespace) -> int:
    """The fleet runs: its spec becomes that of the file, as with `kubectl apply`."""
    before = home.read(fleet.resource) or {}
    info = look(fleet).info
    if info.get("stopping"):
        raise FleetError(f"fleet {fleet.name} is stopping; try again when it is gone")
    after = home.edit(fleet, lambda old: _merged(old, resource))
    if after["spec"] == before.get("spec"):
        raise FleetError(
            f"fleet {fleet.name} is running already at {info.get('endpoint', 'an address to come')} (process {info.get('pid')}), "
            f"and {args.file} asks for nothing else; stop it with `decodefleet down {fleet.name}`"
        )
    generation, began = after["metadata"]["generation"], time.monotonic()
    with _signals() as asked, display(fleet.name, None, detached=True) as screen:
        screen.note(f"{fleet.name} runs already; its spec is now that of {args.file} (generation {generation})")
        while not asked:
            snapshot = look(fleet)
            if not home.running(fleet):
                screen.failed("it was stopped meanwhile", what="is gone")
                return 1
            if snapshot.ready:
                screen.ready(snapshot, time.monotonic() - began)
                return 0
            if snapshot.failure is not None:
                onward = f"What ran before goes on where it can; mend {args.file} and run this again"
                screen.failed(f"{snapshot.failure}\n{onward}", what="cannot become what the file asks for")
                return 1
            if args.timeout is not None and time.monotonic() - began > args.timeout:
                screen.failed(
                    f"it was not ready after {args.timeout:g} seconds; it goes on, see `decodefleet describe {fleet.name}`",
                    what="takes long",
                )
                return 1
            screen.show(snapshot)
            time.sleep(POLL)
        screen.note(f"{fleet.name} goes on; see `decodefleet describe {fleet.name}`")
        return 130


def _new(resource: DecoderDeployment) -> Json:
    """The resource as Kubernetes would store it on creation."""
    document = resource.model_dump(mode="json", by_alias=True, exclude_unset=True)
    document["spec"].setdefault("replicas", resource.spec.replicas)
    metadata = document["metadata"] | {"namespace": "default", "uid": str(uuid.uuid4()), "generation": 1, "resourceVersion": "1"}
    metadata["creationTimestamp"] = home.now()
    metadata["annotations"] = metadata.get("annotations", {}) | _written()
    return {"apiVersion": resource.api_version, "kind": resource.kind, "metadata": metadata, "spec": document["spec"]}


def _merged(old: Json, resource: DecoderDeployment) -> Json:
    """The stored resource with the file's spec. A file without `replicas` leaves the count to whoever set it."""
    spec = resource.model_dump(mode="json", by_alias=True, exclude_unset=True)["spec"]
    if "replicas" not in spec:
        spec["replicas"] = old["spec"]["replicas"]
    elif spec["replicas"] != old["spec"]["replicas"]:
        old["metadata"].setdefault("annotations", {}).update(_written())
    return old | {"spec": spec}


def _written() -> dict[str, str]:
    return {REPLICAS_MANAGER: MANAGER, REPLICAS_WRITTEN_AT: repr(time.time())}


def _start(fleet: Fleet, host: str, port: int, lock: int, tied: bool) -> subprocess.Popen[bytes]:
    """The supervisor, in a session of its own; a tied one stops the fleet when this process ends, however it ends."""
    command = [sys.executable, "-m", "decodefleet_operator.local.supervisor", str(fleet.path), host, str(port), str(lock)]
    if tied:
        command = [sys.executable, "-m", "decodefleet_operator.local.tied", "SIGTERM", str(os.getpid()), *command]
    with fleet.log.open("ab") as log:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=[lock],
            start_new_session=True,
            env={**os.environ, "PYTHONSAFEPATH": "1"},
        )


@contextlib.contextmanager
def _signals() -> Iterator[list[int]]:
    """The requests to stop that have come, in order; they no longer end this process by themselves."""
    asked: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, lambda number, frame: asked.append(number)) for number in numbers}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _tail(fleet: Fleet, lines: int = 10) -> str:
    with contextlib.suppress(OSError):
        return "\n".join(fleet.log.read_text(errors="replace").splitlines()[-lines:])
    return ""
