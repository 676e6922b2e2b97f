"""Where local fleets keep their files, and how several processes share them safely.

A fleet is one folder. Whoever holds the lock on its `lock` file is its supervisor; a folder whose lock is free was left behind.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from decodefleet.endpoints import state_directory

NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")

Json = dict[str, Any]

_START = "start one with `decodefleet up -f examples/smollm2.yaml`"
_PATIENCE = 0.5  # seconds for somebody who only looks whether the lock is free


class FleetError(Exception):
    """A local fleet cannot do what was asked; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """The files of one fleet."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def lock(self) -> Path:
        return self.path / "lock"

    @property
    def info(self) -> Path:
        """What clients need: name, endpoint (once it is bound), pid, startedAt; `error` after a failed start."""
        return self.path / "fleet.json"

    @property
    def resource(self) -> Path:
        """The DecoderDeployment, spec and status, as Kubernetes would return it."""
        return self.path / "resource.json"

    @property
    def agents(self) -> Path:
        """What the supervisor says of its processes, several times a second."""
        return self.path / "agents.json"

    @property
    def events(self) -> Path:
        return self.path / "events.json"

    @property
    def ledger(self) -> Path:
        return self.path / "ledger.json"

    @property
    def token(self) -> Path:
        return self.path / "token"

    @property
    def stop(self) -> Path:
        """How to stop, for the supervisor that gets SIGTERM."""
        return self.path / "stop.json"

    @property
    def log(self) -> Path:
        return self.path / "supervisor.log"

    def agent_folder(self, pod: str) -> Path:
        return self.path / "agents" / pod


def home() -> Path:
    """The folder of all local fleets: $DECODEFLEET_HOME, or decodefleet in the XDG state folder."""
    return state_directory()


def fleet(name: str) -> Fleet:
    """The fleet of that name, whether it exists or not. Raises FleetError for what cannot be a name."""
    if not NAME.fullmatch(name):
        raise FleetError(f"{name!r} cannot be a fleet's name; names have lower-case letters, digits and dashes")
    return Fleet(home() / name)


def fleets() -> list[Fleet]:
    """All folders of fleets, those left behind included, by name."""
    folder = home()
    if not folder.is_dir():
        return []
    return [Fleet(path) for path in sorted(folder.iterdir()) if path.is_dir() and NAME.fullmatch(path.name) and (path / "lock").exists()]


def running(fleet: Fleet) -> bool:
    """Whether its supervisor lives."""
    try:
        descriptor = os.open(fleet.lock, os.O_RDWR)
    except (FileNotFoundError, NotADirectoryError):
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


@contextlib.contextmanager
def owned(fleet: Fleet) -> Iterator[Callable[[], bool]]:
    """Tells whether the process that owns the fleet now lives on, also after it has removed the folder. Raises FleetError if none does."""
    try:
        descriptor = os.open(fleet.lock, os.O_RDWR)
    except FileNotFoundError as error:
        raise FleetError(f"fleet {fleet.name} is gone") from error

    def still_owned() -> bool:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        return False

    try:
        yield still_owned
    finally:
        os.close(descriptor)


def only(name: str | None) -> Fleet:
    """The running fleet of that name, or the only one there is. Raises FleetError."""
    alive = [f for f in fleets() if running(f)]
    names = ", ".join(f.name for f in alive)
    if name is not None:
        found = fleet(name)
        if found in alive:
            return found
        raise FleetError(f"there is no fleet {name!r} here; " + (f"running: {names}" if alive else _START))
    if len(alive) == 1:
        return alive[0]
    raise FleetError(f"several fleets run: {names}; name one" if alive else f"no fleet runs here; {_START}")


def claim(fleet: Fleet) -> int:
    """Makes the fleet's folder and takes its lock; clears what a killed supervisor left. Returns the lock's descriptor.

    The descriptor can be handed to the supervisor's process: the lock lives until its last copy is closed. Raises FleetError.
    """
    deadline = time.monotonic() + _PATIENCE
    while True:
        fleet.path.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(fleet.lock, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            if time.monotonic() < deadline:
                time.sleep(_PATIENCE / 10)
                continue
            raise FleetError(f"fleet {fleet.name} is running already; `decodefleet get {fleet.name}` shows it") from None
        # Between open and flock another process may have removed the folder: then this lock guards nothing.
        with contextlib.suppress(FileNotFoundError):
            if os.stat(fleet.lock).st_ino == os.fstat(descriptor).st_ino:
                break
        os.close(descriptor)
    for path in fleet.path.iterdir():
        if path.name != "lock":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    return descriptor


def remove(fleet: Fleet) -> None:
    """Removes the fleet's folder, and the home if it was the last. The caller holds the lock or knows that nobody does."""
    # The lock's file goes last, so that nobody takes a half-removed folder for one that is left behind.
    for path in fleet.path.iterdir() if fleet.path.is_dir() else ():
        if path.name != "lock":
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
    shutil.rmtree(fleet.path, ignore_errors=True)
    with contextlib.suppress(OSError):
        fleet.path.parent.rmdir()


def clear_if_dead(fleet: Fleet) -> bool:
    """Removes the folder of a fleet whose supervisor was killed. Whether it did."""
    try:
        descriptor = os.open(fleet.lock, os.O_RDWR)
    except (FileNotFoundError, NotADirectoryError):
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        remove(fleet)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True


def read(path: Path) -> Json | None:
    """A JSON file of a fleet; None where it is not there (yet)."""
    try:
        return json.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError):
        return None


def write(path: Path, value: Any, mode: int = 0o600) -> None:
    """Replaces a JSON file in one step: a reader sees the old content or the new."""
    write_text(path, json.dumps(value, indent=1) + "\n", mode)


def write_text(path: Path, text: str, mode: int = 0o600) -> None:
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
        os.chmod(temporary, mode)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


@contextlib.contextmanager
def _editing(fleet: Fleet) -> Iterator[None]:
    """Held while the resource is read, changed and written."""
    descriptor = os.open(fleet.path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def edit(fleet: Fleet, change: Callable[[Json], Json]) -> Json:
    """Changes the resource and returns what was written. A new spec gets a new generation. Raises FleetError if the fleet is gone."""
    try:
        with _editing(fleet):
            old = read(fleet.resource)
            if old is None:
                raise FileNotFoundError
            new = change(json.loads(json.dumps(old)))
            if new == old:
                return old
            if new["spec"] != old["spec"]:
                new["metadata"]["generation"] = old["metadata"]["generation"] + 1
            new["metadata"]["resourceVersion"] = str(int(old["metadata"]["resourceVersion"]) + 1)
            write(fleet.resource, new)
            return new
    except FileNotFoundError as error:
        raise FleetError(f"fleet {fleet.name} is gone") from error


def now() -> str:
    """The time as Kubernetes writes it."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
