"""The project's own rules: layout, import contracts, generated files, and text that names no single machine."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
VERSION = re.compile(r"(?m)^# Protobuf Python Version: .*|^    \d+,$|^GRPC_GENERATED_VERSION = .*")


def tracked() -> list[Path]:
    """The files that git knows, or would take."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    return [path for name in listed.split("\0") if name and (path := ROOT / name).is_file()]


def output(*command: str) -> str:
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("folder", ["operator", "tests/operator"])
def test_no_package_shadows_the_standard_operator(folder: str) -> None:
    assert not (ROOT / folder / "__init__.py").exists()


def test_import_contracts() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from importlinter.cli import lint_imports_command; lint_imports_command()"],
        cwd=ROOT, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_text_names_no_single_machine() -> None:
    """No path of somebody's checkout, nor of what happens to lie beside it; .ci/run alone knows its surroundings."""
    local = re.compile(r"(?<![\w.*/-])/(?:home|Users|root|work)/\w+|shared/kube")
    found = []
    for path in tracked():
        if path.relative_to(ROOT).as_posix() in (".ci/run", Path(__file__).relative_to(ROOT).as_posix()):
            continue
        try:
            lines = path.read_text().splitlines()
        except UnicodeDecodeError:
            continue
        found += [f"{path.relative_to(ROOT)}:{i}: {line[:120]}" for i, line in enumerate(lines, 1) if local.search(line)]
    assert not found, "\n".join(found)


def test_python_files_are_short() -> None:
    long = {
        str(path.relative_to(ROOT)): lines
        for path in tracked()
        if path.suffix == ".py" and "_pb2" not in path.name and (lines := len(path.read_text().splitlines())) > 400
    }
    assert not long


def test_stubs_are_those_of_the_protos(tmp_path: Path) -> None:
    output("tools/protos.py", "stubs", str(tmp_path))
    generated = sorted(tmp_path.glob("decodefleet/v1/*"))
    assert len(generated) == 6
    for path in generated:
        committed = (ROOT / "proto" / path.relative_to(tmp_path)).read_text()
        # The generator's version may differ from the one that made them; what they say may not.
        assert VERSION.sub("", committed) == VERSION.sub("", path.read_text()), f"{path.name}: run `make proto`"


def test_reference_of_the_protos_is_current() -> None:
    assert (ROOT / "docs/reference-proto.md").read_text() == output("tools/protos.py", "reference"), "run `make docs-reference`"


def test_chart_has_the_crd() -> None:
    assert (ROOT / "charts/decodefleet/templates/crd.yaml").read_text() == output("tools/chart_crd.py"), "run `make crd`"
