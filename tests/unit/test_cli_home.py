"""The files of local fleets: one owner at a time, nothing half written, nothing left."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from decodefleet_operator.local import home
from decodefleet_operator.local.home import FleetError


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DECODEFLEET_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def test_the_home_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert home.home() == tmp_path / "home"
    monkeypatch.delenv("DECODEFLEET_HOME")
    monkeypatch.setenv("XDG_STATE_HOME", "/state")
    assert home.home() == Path("/state/decodefleet")
    monkeypatch.delenv("XDG_STATE_HOME")
    assert home.home() == Path.home() / ".local/state/decodefleet"


def test_a_fleet_has_one_owner_until_the_last_copy_of_its_lock_is_closed(folder: Path) -> None:
    fleet = home.fleet("a")
    lock = home.claim(fleet)
    copy = os.dup(lock)
    with pytest.raises(FleetError, match="running already"):
        home.claim(fleet)
    os.close(lock)
    assert home.running(fleet)
    assert not home.clear_if_dead(fleet)
    os.close(copy)
    assert not home.running(fleet)


def test_what_a_killed_supervisor_left_is_cleared(folder: Path) -> None:
    fleet = home.fleet("a")
    os.close(home.claim(fleet))
    home.write(fleet.info, {"endpoint": "old"})
    fleet.agent_folder("p").mkdir(parents=True)
    assert home.fleets() == [fleet]
    lock = home.claim(fleet)
    assert [path.name for path in fleet.path.iterdir()] == ["lock"]
    os.close(lock)
    assert home.clear_if_dead(fleet)
    assert list(folder.iterdir()) == []


def test_the_default_home_goes_with_its_last_fleet_and_a_chosen_one_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DECODEFLEET_HOME")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    os.close(home.claim(home.fleet("a")))
    home.remove(home.fleet("a"))
    assert list(tmp_path.iterdir()) == []


STRANGE = [("weights.safetensors",), ("token",), ("agents/a.txt",), ("lock", "token"), ("lock", "fleet.json", "notes.txt"), ("lock/x",)]


@pytest.mark.parametrize("names", STRANGE, ids=" ".join)
def test_a_folder_that_is_no_fleets_is_refused_and_keeps_its_files(folder: Path, names: tuple[str, ...]) -> None:
    fleet = home.fleet("a")
    for name in names:
        file = fleet.path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("precious")
    with pytest.raises(FleetError, match=r"holds what is no fleet's, such as .*; give the fleet another metadata.name"):
        home.claim(fleet)
    assert not home.running(fleet)
    assert not home.clear_if_dead(fleet)
    assert home.fleets() == []
    assert [(fleet.path / name).read_text() for name in names] == ["precious"] * len(names)


def test_what_others_put_into_a_fleets_folder_outlives_it(folder: Path) -> None:
    fleet = home.fleet("a")
    os.close(home.claim(fleet))
    home.write(fleet.info, {})
    (fleet.path / ".fleet.json.draft").touch()
    (fleet.path / "notes.txt").write_text("precious")
    (fleet.path / "mine").mkdir()
    assert home.clear_if_dead(fleet)
    assert sorted(path.name for path in fleet.path.iterdir()) == ["mine", "notes.txt"]
    with pytest.raises(FleetError, match=r"such as (mine|notes.txt)"):
        home.claim(fleet)


def test_removing_one_fleet_leaves_the_others(folder: Path) -> None:
    one, other = home.fleet("a"), home.fleet("b")
    locks = [home.claim(one), home.claim(other)]
    home.remove(one)
    assert home.fleets() == [other]
    assert home.only(None) == other
    for lock in locks:
        os.close(lock)


def test_the_only_fleet_needs_no_name(folder: Path) -> None:
    with pytest.raises(FleetError, match="no fleet runs here"):
        home.only(None)
    locks = [home.claim(home.fleet(name)) for name in ("a", "b")]
    with pytest.raises(FleetError, match="several fleets run: a, b; name one"):
        home.only(None)
    with pytest.raises(FleetError, match="no fleet 'c' here; running: a, b"):
        home.only("c")
    assert home.only("b") == home.fleet("b")
    for lock in locks:
        os.close(lock)


def test_a_new_spec_is_a_new_generation_and_a_status_is_not(folder: Path) -> None:
    fleet = home.fleet("a")
    lock = home.claim(fleet)
    home.write(fleet.resource, {"metadata": {"generation": 1, "resourceVersion": "1"}, "spec": {"replicas": 1}})
    home.edit(fleet, lambda r: r | {"status": {"replicas": 1}})
    assert home.read(fleet.resource)["metadata"] == {"generation": 1, "resourceVersion": "2"}
    home.edit(fleet, lambda r: r | {"spec": {"replicas": 2}})
    assert home.read(fleet.resource)["metadata"] == {"generation": 2, "resourceVersion": "3"}
    before = fleet.resource.stat().st_ino
    home.edit(fleet, lambda r: r)
    assert fleet.resource.stat().st_ino == before, "an edit without a change writes"
    os.close(lock)
    home.remove(fleet)
    with pytest.raises(FleetError, match="is gone"):
        home.edit(fleet, lambda r: r)


COUNT_UP = """
from decodefleet_operator.local import home

def more(resource):
    resource["spec"]["n"] += 1
    return resource

for _ in range(50):
    home.edit(home.fleet("a"), more)
"""


def test_edits_of_several_processes_lose_nothing(folder: Path) -> None:
    fleet = home.fleet("a")
    lock = home.claim(fleet)
    home.write(fleet.resource, {"metadata": {"generation": 1, "resourceVersion": "1"}, "spec": {"n": 0}})
    workers = [subprocess.Popen([sys.executable, "-c", COUNT_UP]) for _ in range(3)]
    assert [worker.wait(120) for worker in workers] == [0, 0, 0]
    assert home.read(fleet.resource)["spec"] == {"n": 150}
    assert sorted(path.name for path in fleet.path.iterdir()) == ["lock", "resource.json"]
    os.close(lock)


def test_a_token_is_for_its_owner_alone(folder: Path) -> None:
    fleet = home.fleet("a")
    lock = home.claim(fleet)
    home.write_text(fleet.token, "secret")
    assert fleet.token.stat().st_mode & 0o777 == 0o600
    assert fleet.path.stat().st_mode & 0o777 == 0o700
    os.close(lock)


def test_a_write_that_fails_leaves_the_old_content(folder: Path) -> None:
    fleet = home.fleet("a")
    lock = home.claim(fleet)
    home.write(fleet.info, {"a": 1})
    with pytest.raises(TypeError):
        home.write(fleet.info, {"a": object()})
    assert json.loads(fleet.info.read_text()) == {"a": 1}
    os.close(lock)


def test_a_disk_that_is_full_is_told_with_the_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, mode: str) -> None:
        os.close(descriptor)
        raise OSError(errno.ENOSPC, "No space left on device")

    fleet = home.fleet("a")
    lock = home.claim(fleet)
    monkeypatch.setattr(os, "fdopen", full)
    with pytest.raises(OSError, match="No space left") as error:
        home.write(fleet.info, {"a": 1})
    assert error.value.filename == str(fleet.info)
    assert [path.name for path in fleet.path.iterdir()] == ["lock"]
    os.close(lock)


def test_an_owner_is_seen_until_it_ends_also_when_the_folder_is_gone(folder: Path) -> None:
    fleet = home.fleet("a")
    lock = home.claim(fleet)
    with home.owned(fleet) as still_owned:
        home.remove(fleet)
        assert not home.running(fleet)
        assert still_owned()
        os.close(lock)
        assert not still_owned()
