"""Where the fleets of this machine listen: `decodefleet up` leaves one fleet.json each."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path


class NoEndpoint(Exception):
    """There is no fleet to talk to, or more than one; the message says what to do."""


@dataclass(frozen=True)
class LocalFleet:
    """A running fleet of this machine; `endpoint` is host:port, None while it is not bound yet."""

    name: str
    endpoint: str | None
    pid: int


def host_port(host: str, port: int) -> str:
    """host:port as gRPC and URLs write it; an IPv6 host gets its brackets."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def state_directory() -> Path:
    """$DECODEFLEET_HOME, or decodefleet in the XDG state directory."""
    if home := os.environ.get("DECODEFLEET_HOME"):
        return Path(home).expanduser().absolute()
    state = os.environ.get("XDG_STATE_HOME")
    return (Path(state) if state else Path.home() / ".local" / "state") / "decodefleet"


def local_fleets() -> list[LocalFleet]:
    """Fleets whose process lives, by name."""
    fleets = [_read(path) for path in sorted(state_directory().glob("*/fleet.json"))]
    return [fleet for fleet in fleets if fleet is not None and _alive(fleet.pid)]


def local_endpoint(name: str | None = None) -> str:
    """The endpoint of the fleet with the name, or of the only one. Raises NoEndpoint."""
    fleets = local_fleets()
    if name is not None:
        fleets = [fleet for fleet in fleets if fleet.name == name]
    if not fleets:
        what = "no fleet runs on this machine" if name is None else f"no fleet named {name!r} runs on this machine"
        raise NoEndpoint(f"{what}; start one with `decodefleet up -f examples/smollm2.yaml`, or pass --endpoint HOST:PORT")
    if len(fleets) > 1:
        raise NoEndpoint(f"{len(fleets)} fleets run on this machine; choose one with --fleet: {', '.join(fleet.name for fleet in fleets)}")
    if fleets[0].endpoint is None:
        raise NoEndpoint(f"the fleet {fleets[0].name!r} is still starting; `decodefleet get` shows how far it is")
    return fleets[0].endpoint


def _read(path: Path) -> LocalFleet | None:
    """None for a file that is being written or removed, or is not a fleet's."""
    try:
        data = json.loads(path.read_text())
        return LocalFleet(data["name"], data.get("endpoint"), data["pid"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
