"""`decodefleet down`: stops a fleet and waits until nothing is left of it."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import time

from decodefleet_operator.local import home
from decodefleet_operator.local.home import Fleet, FleetError
from decodefleet_operator.local.watch import look

POLL = 0.1
BEYOND_GRACE = 20.0  # seconds until a supervisor that does not end is killed; its agents end with it


def run(args: argparse.Namespace) -> int:
    if args.name is None and not any(home.running(f) for f in home.fleets()):
        return _clear(home.fleets(), None)
    if args.name is not None and not home.running(home.fleet(args.name)):
        return _clear([f for f in home.fleets() if f.name == args.name], args.name)
    fleet = home.only(args.name)
    snapshot = look(fleet)
    grace = args.timeout if args.timeout is not None else _drain_timeout(snapshot.resource)
    if args.timeout is not None:
        home.write(fleet.stop, {"timeout": args.timeout})
    streams = snapshot.open_streams
    if streams:
        print(f"{fleet.name}: waiting for {streams} open stream{'s' if streams > 1 else ''}, {grace:g}s at most", flush=True)
    pid = int(snapshot.info["pid"]) if "pid" in snapshot.info else None
    if pid is None:
        raise FleetError(f"fleet {fleet.name} is just starting; try again in a moment")
    with home.owned(fleet) as still_owned:
        _signal(pid, signal.SIGTERM)
        deadline = time.monotonic() + grace + BEYOND_GRACE
        while still_owned():
            if time.monotonic() > deadline:
                _signal(pid, signal.SIGKILL)
                deadline += BEYOND_GRACE
            time.sleep(POLL)
    home.clear_if_dead(fleet)
    print(f"{fleet.name} is stopped; nothing is left of it")
    return 0


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _clear(left: list[Fleet], name: str | None) -> int:
    """No such fleet runs: what killed supervisors left is removed."""
    cleared = [fleet.name for fleet in left if home.clear_if_dead(fleet)]
    if not cleared:
        home.only(name)  # says what there is instead
    for fleet in cleared:
        print(f"{fleet} was not running any more; what it left is removed")
    return 0


def _drain_timeout(resource: home.Json) -> float:
    from decodefleet_operator.api import DecoderDeployment

    return DecoderDeployment.model_validate(resource).spec.drain_timeout if resource else 0.0
