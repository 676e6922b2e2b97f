"""Breaks a copy of the project, one patch at a time, and expects the tests that guard the broken part to fail, and to pass without it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
GUARDS = {
    "planner": ["tests/unit/test_plan_pods.py"],
    "engine": ["tests/unit/test_engine_kv_pool.py", "tests/unit/test_engine_scheduler.py"],
    "chart": ["tests/unit/test_chart.py"],
}
SOURCES = ("proto", "operator", "node_agent")
ALL_PASSED, SOME_FAILED = 0, 1  # pytest's exit codes


def copy(target: Path) -> None:
    """The files that git knows, or would take, as they are now."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    for name in subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0"):
        if name and (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def run_tests(tree: Path, tests: list[str]) -> subprocess.CompletedProcess[str]:
    """pytest over the tree's own sources, which go before the installed ones."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(str(tree / name) for name in SOURCES), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    return subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)


def patch(tree: Path, name: str, *options: str) -> None:
    subprocess.run(["git", "apply", *options, str(HERE / f"{name}.patch")], cwd=tree, check=True)


def try_mutation(tree: Path, name: str, tests: list[str]) -> str | None:
    """What is wrong: None if the tests see the mutation."""
    clean = run_tests(tree, tests)
    if clean.returncode != ALL_PASSED or " passed" not in clean.stdout:
        return f"{' '.join(tests)} do not pass, or do not run, before anything is broken:\n{clean.stdout[-3000:]}"
    patch(tree, name)
    broken = run_tests(tree, tests)
    patch(tree, name, "--reverse")
    if broken.returncode != SOME_FAILED:
        return f"{' '.join(tests)} ended with {broken.returncode} although the {name} is broken:\n{broken.stdout[-3000:]}"
    first = next((line for line in broken.stdout.splitlines() if line.startswith("FAILED ")), "")
    print(f"    red: {first}")
    return None


def main() -> int:
    wrong = 0
    with tempfile.TemporaryDirectory() as scratch:
        tree = Path(scratch)
        copy(tree)
        subprocess.run(["git", "init", "-q"], cwd=tree, check=True)  # some tests ask git for the project's files
        for name, tests in GUARDS.items():
            what = (HERE / f"{name}.patch").read_text().splitlines()[0]
            print(f"{name}: {what}", flush=True)
            began = time.monotonic()
            problem = try_mutation(tree, name, tests)
            wrong += problem is not None
            print(f"    {problem or 'seen'} ({time.monotonic() - began:.0f} s)", flush=True)
    print(f"{len(GUARDS) - wrong} passed, {wrong} failed")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
