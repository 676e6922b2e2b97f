"""A real etcd and kube-apiserver on ports of their own, and kube-controller-manager where there is one."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

REQUIRED = ("etcd", "kube-apiserver")
START_TIMEOUT = 120.0


def program(name: str) -> str | None:
    """Its path: in the folder that KUBEBUILDER_ASSETS names, else on PATH."""
    folder = os.environ.get("KUBEBUILDER_ASSETS")
    return (shutil.which(name, path=folder) if folder else None) or shutil.which(name)


def missing() -> list[str]:
    """Programs without which no control plane can be started."""
    return [name for name in (*REQUIRED, "openssl") if program(name) is None]


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


class ControlPlane:
    """Ends, by their process handles, exactly the programs that it started."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.token = secrets.token_hex(16)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._port = 0
        self.has_controller_manager = False

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self._port}"

    @property
    def kubeconfig(self) -> Path:
        return self.home / "kubeconfig"

    def start(self) -> None:
        """Returns once the API server is ready. Raises RuntimeError with the tail of a program's log."""
        key = self.home / "service-account.key"
        subprocess.run([program("openssl") or "openssl", "genrsa", "-out", key, "2048"], check=True, capture_output=True)
        tokens = self.home / "tokens.csv"
        tokens.write_text(f"{self.token},admin,admin,system:masters\n")
        client, peer, self._port = free_port(), free_port(), free_port()
        etcd = f"http://127.0.0.1:{client}"
        own = ["--listen-client-urls", etcd, "--advertise-client-urls", etcd, "--listen-peer-urls", f"http://127.0.0.1:{peer}"]
        self._start("etcd", "--data-dir", str(self.home / "etcd"), "--unsafe-no-fsync", "--log-level", "error", *own)
        self._start(
            "kube-apiserver",
            *("--etcd-servers", etcd, "--bind-address", "127.0.0.1", "--secure-port", str(self._port)),
            *("--cert-dir", str(self.home / "certificates"), "--token-auth-file", str(tokens), "--authorization-mode", "RBAC"),
            *("--service-account-key-file", str(key), "--service-account-signing-key-file", str(key)),
            *("--service-account-issuer", "https://kubernetes.default.svc", "--service-cluster-ip-range", "10.96.0.0/16"),
            # Without the controller manager nobody makes the service account that this plugin wants.
            *("--disable-admission-plugins", "ServiceAccount", "--profiling=false"),
        )
        self.write_kubeconfig(self.kubeconfig, self.url)
        self._wait_ready()

    def start_controller_manager(self) -> bool:
        """Owner references, namespace deletion, quota and disruption budgets work with it; False where it is not installed."""
        if program("kube-controller-manager") is None:
            return False
        self._start(
            "kube-controller-manager",
            *("--kubeconfig", str(self.kubeconfig), "--leader-elect=false", "--secure-port", "0"),
            *("--controllers", "garbagecollector,namespace,resourcequota,disruption"),
        )
        self.has_controller_manager = True
        return True

    def write_kubeconfig(self, path: Path, server: str, token: str | None = None) -> Path:
        """For the real server, or for something in front of it."""
        cluster = {"server": server} | ({"insecure-skip-tls-verify": True} if server.startswith("https") else {})
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
            "clusters": [{"name": "test", "cluster": cluster}],
            "users": [{"name": "test", "user": {"token": token or self.token}}],
        }
        path.write_text(json.dumps(document))
        return path

    def stop(self) -> None:
        """At once: nothing of it is kept."""
        for process in reversed(self._processes):
            process.kill()
            process.wait()

    def _start(self, name: str, *arguments: str) -> None:
        executable = program(name)
        if executable is None:
            raise RuntimeError(f"{name} is not installed")
        with (self.home / f"{name}.log").open("wb") as log:
            self._processes.append(
                subprocess.Popen([executable, *arguments], stdout=log, stderr=log, stdin=subprocess.DEVNULL, cwd=self.home)
            )

    def _wait_ready(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT
        context = ssl._create_unverified_context()
        request = urllib.request.Request(f"{self.url}/readyz", headers={"Authorization": f"Bearer {self.token}"})
        while time.monotonic() < deadline:
            for process in self._processes:
                if process.poll() is not None:
                    raise RuntimeError(f"{process.args[0]} ended: {self._logs()}")  # type: ignore[index]
            try:
                with urllib.request.urlopen(request, context=context, timeout=5) as response:
                    if response.read() == b"ok":
                        return
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                pass
            time.sleep(0.1)
        raise RuntimeError(f"the API server was not ready in {START_TIMEOUT:.0f} s: {self._logs()}")

    def _logs(self) -> str:
        return "\n".join(path.read_text(errors="replace")[-2000:] for path in sorted(self.home.glob("*.log")))
