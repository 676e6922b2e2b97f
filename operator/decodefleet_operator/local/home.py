"""Where local fleets keep their files, and how several processes share them safely.

A fleet is one folder. Whoever holds the lock on its `lock` file is its supervisor; a folder whose lock is free was left behind.
What other programs keep in such a folder is never touched.
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
_MARK = b"decodefleet\n"  # in the lock's file: the folder is a fleet's
_DOCUMENTS = ("fleet.json", "resource.json", "agents.json", "events.json", "ledger.json", "stop.json")
_FILES = frozenset({"lock", "token", "supervisor.log", *_DOCUMENTS})
_FOLDERS = frozenset({"agents"})


class FleetError(Exception):
    """A local fleet cannot do what was asked; the message says why and what to do."""


class RunningAlready(FleetError):
    """Somebody owns the fleet."""


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
    return [Fleet(path) for path in sorted(folder.iterdir()) if NAME.fullmatch(path.name) and _marked(path / "lock")]


def running(fleet: Fleet) -> bool:
    """Whether its supervisor lives."""
    try:
        descriptor = os.open(fleet.lock, os.O_RDWR)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
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

    The descriptor can be handed to the supervisor's process: the lock lives until its last copy is closed. Raises FleetError, which is
    RunningAlready where somebody has the lock.
    """
    deadline = time.monotonic() + _PATIENCE
    while True:
        fleet.path.mkdir(parents=True, exist_ok=True, mode=0o700)
        try:
            _check_ours(fleet)
            descriptor = os.open(fleet.lock, os.O_RDWR | os.O_CREAT, 0o600)
        except FileNotFoundError:
            continue  # its last owner has just removed the folder
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            if time.monotonic() < deadline:
                time.sleep(_PATIENCE / 10)
                continue
            raise RunningAlready(f"fleet {fleet.name} is running already; `decodefleet get {fleet.name}` shows it") from None
        # Between open and flock another process may have removed the folder: then this lock guards nothing.
        with contextlib.suppress(FileNotFoundError):
            if os.stat(fleet.lock).st_ino == os.fstat(descriptor).st_ino:
                break
        os.close(descriptor)
    os.pwrite(descriptor, _MARK, 0)
    _clear(fleet)
    return descriptor


def remove(fleet: Fleet) -> None:
    """Removes what the fleet wrote, its folder, and the default home if it was the last.

    The caller holds the lock or knows that nobody does.
    """
    _clear(fleet)
    # The lock's file goes last, so that nobody takes a half-removed folder for one that is left behind.
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        fleet.lock.unlink()
    with contextlib.suppress(OSError):
        fleet.path.rmdir()
        if "DECODEFLEET_HOME" not in os.environ:  # a folder that somebody chose is theirs
            fleet.path.parent.rmdir()


def _clear(fleet: Fleet) -> None:
    """Removes all that a fleet writes, its lock aside, and nothing else."""
    for path in fleet.path.iterdir() if fleet.path.is_dir() else ():
        if path.name == "lock" or not _ours(path):
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _ours(path: Path) -> bool:
    """Whether a fleet writes an entry of that name and kind, or a draft of it."""
    if path.is_dir():
        return path.name in _FOLDERS
    draft = path.name.startswith(".") and path.name[1:].rpartition(".")[0] in _FILES
    return path.name in _FILES or draft


def _marked(lock: Path) -> bool:
    """Whether a fleet made the file."""
    try:
        with lock.open("rb") as file:
            return file.read(len(_MARK) + 1) == _MARK
    except OSError:
        return False


def _check_ours(fleet: Fleet) -> None:
    """Raises FleetError for a folder with what no fleet wrote."""
    found = sorted(fleet.path.iterdir())
    fresh = all(path.name == "lock" and path.is_file() and path.stat().st_size == 0 for path in found)  # or another one is claiming it
    strange = [path for path in found if not _ours(path)]
    removed = fleet.lock in found and not fleet.lock.exists()  # by its last owner, meanwhile
    if strange or not (fresh or removed or _marked(fleet.lock)):
        example = (strange or found)[0].name
        raise FleetError(
            f"{fleet.path} holds what is no fleet's, such as {example}; give the fleet another metadata.name, "
            "or set DECODEFLEET_HOME to a folder for fleets alone"
        )


def clear_if_dead(fleet: Fleet) -> bool:
    """Removes the folder of a fleet whose supervisor was killed. Whether it did."""
    if not _marked(fleet.lock):
        return False
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
    except BaseException as error:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        if isinstance(error, OSError):
            error.filename = str(path)  # a full disk names none
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
