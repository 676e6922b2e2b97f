"""The plan does no I/O and reads no clock: neither its code nor what it runs."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import decodefleet_operator

SOURCES = {"decodefleet_operator": Path(decodefleet_operator.__file__).parent}
FORBIDDEN = {
    "asyncio", "grpc", "http", "kopf", "kubernetes", "multiprocessing", "os", "pathlib", "random", "secrets", "select", "shutil", "socket",
    "subprocess", "tempfile", "threading", "time", "urllib", "uuid",
}  # fmt: skip

RUN = """
import sys
sys.path.insert(0, sys.argv[1])
from plan_world import NOW, World, deployment
from decodefleet_operator.ledger import dumps, loads
from decodefleet_operator.plan import plan

sla = {"objectives": [{"name": "ttft", "metric": "TimeToFirstToken", "threshold": "1s", "target": "95%"}]}
world = World(deployment(autoscaling={"maxReplicas": 5}, sla=sla), output=1500.0)
world.run(60)  # what is imported lazily is imported now
seen = []
hooked = True
sys.addaudithook(lambda event, _: seen.append(event) if hooked else None)
for how in ("fail", "lose", "delete", "silence"):
    world.kill(0, how)
    world.run(200)
world.revision = "r2"
world.output = 0.0
world.run(900)
loads(dumps(world.ledger))
hooked = False
sys.exit(f"audited: {sorted(set(seen))}" if seen else 0)
"""


def closure(module: str) -> dict[str, set[str]]:
    """Modules of ours that `module` imports, directly or not, each with all that it imports."""
    found: dict[str, set[str]] = {}
    todo = [module]
    while todo:
        name = todo.pop()
        path = SOURCES["decodefleet_operator"] / f"{name.partition('.')[2]}.py"
        tree = ast.parse(path.read_text())
        imports = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                inner = {f"{node.module}.{alias.name}" for alias in node.names} if node.module == "decodefleet_operator" else {node.module}
                imports |= inner
        found[name] = imports
        todo += [name for name in imports if name.startswith("decodefleet_operator.") and name not in found]
    return found


def test_the_import_closure_of_the_plan_holds_no_io() -> None:
    modules = closure("decodefleet_operator.plan")
    assert {"decodefleet_operator.autoscale", "decodefleet_operator.sla", "decodefleet_operator.drain"} <= set(modules)
    for name, imports in modules.items():
        assert not {i.partition(".")[0] for i in imports} & FORBIDDEN, name


@pytest.mark.parametrize("call", ["now", "utcnow", "today", "open", "input", "print"])
def test_no_module_of_the_plan_asks_the_clock_or_a_file(call: str) -> None:
    for name in closure("decodefleet_operator.plan"):
        tree = ast.parse((SOURCES["decodefleet_operator"] / f"{name.partition('.')[2]}.py").read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", None)
                assert called != call, f"{name}:{node.lineno}"


def test_the_plan_runs_without_a_single_audited_event() -> None:
    done = subprocess.run([sys.executable, "-c", RUN, str(Path(__file__).parent)], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
