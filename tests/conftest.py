"""What all tests share: at the end, what was skipped, why, and how to run it."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from pathlib import Path

import pytest

# The cuda backend's kernels run on the CPU here; Triton must know before anything imports it. `make gpu-check` runs them on a GPU.
os.environ["TRITON_INTERPRET"] = "1"

KUBEBUILDER_HINT = (
    "The operator's tests need etcd and kube-apiserver in the folder that KUBEBUILDER_ASSETS names, or on PATH. To get them:\n"
    "  go install sigs.k8s.io/controller-runtime/tools/setup-envtest@latest && export KUBEBUILDER_ASSETS=$(setup-envtest use -p path)"
)


def has_api_server() -> bool:
    """Whether a real API server can be started here."""
    folders = os.pathsep.join(filter(None, (os.environ.get("KUBEBUILDER_ASSETS"), os.environ.get("PATH"))))
    return all(shutil.which(name, path=folders) for name in ("etcd", "kube-apiserver"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped: Counter[tuple[str, str]] = Counter()
    for report in terminalreporter.stats.get("skipped", []):
        if isinstance(report.longrepr, tuple):
            path, _, reason = report.longrepr
            skipped[(Path(report.nodeid.partition("::")[0] or path).parent.name, reason.removeprefix("Skipped: "))] += 1
    if not skipped:
        return
    terminalreporter.section("not run")
    for (folder, reason), count in sorted(skipped.items()):
        terminalreporter.line(f"{count} in {folder}: {reason}")
    if not has_api_server():
        terminalreporter.line(KUBEBUILDER_HINT)
