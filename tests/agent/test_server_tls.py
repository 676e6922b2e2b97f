"""TLS by files: server certificates that are read again when they change, and client certificates."""

from __future__ import annotations

import pathlib
import shutil
import subprocess

import grpc
import pytest

from decodefleet.client import Client
from decodefleet.v1 import control_pb2, control_pb2_grpc, decoding_pb2, decoding_pb2_grpc

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl, which makes the certificates, is not installed")


def certificate(folder: pathlib.Path, name: str) -> None:
    """name.pem and name.key for localhost, signed by itself."""
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-keyout", f"{name}.key"]
    subject = ["-subj", f"/CN={name}", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    command = ["openssl", "req", "-x509", "-days", "2", *key, *subject, "-out", f"{name}.pem"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)


def load(address: str, credentials: grpc.ChannelCredentials, timeout: float = 60) -> control_pb2.GetLoadResponse:
    with grpc.secure_channel(address, credentials) as channel:
        return control_pb2_grpc.AgentControlStub(channel).GetLoad(control_pb2.GetLoadRequest(), timeout=timeout)


def test_tls_mutual_tls_and_rotation(start, tools, tmp_path) -> None:
    for name in ("one", "two", "stranger"):
        certificate(tmp_path, name)
    for name, kind in (("cert", "pem"), ("key", "key")):
        shutil.copy(tmp_path / f"one.{kind}", tmp_path / f"live.{name}")

    def read(name: str) -> bytes:
        return (tmp_path / name).read_bytes()

    files = {"certFile": str(tmp_path / "live.cert"), "keyFile": str(tmp_path / "live.key")}
    agent = start(tls=files, controlTls={**files, "clientCaFile": str(tmp_path / "one.pem")}, controlTokenFile=None)

    with Client(agent.address("serving"), credentials=grpc.ssl_channel_credentials(read("one.pem"))) as client:
        assert client.complete("a b", max_tokens=2).text == "a b"
    with grpc.secure_channel(agent.address("serving"), grpc.ssl_channel_credentials(read("two.pem"))) as wrong:
        with pytest.raises(grpc.RpcError) as caught:
            decoding_pb2_grpc.DecodingStub(wrong).GetModel(decoding_pb2.GetModelRequest(), timeout=60)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE

    # The control port takes the client certificate in place of a token.
    trusted = grpc.ssl_channel_credentials(read("one.pem"), read("one.key"), read("one.pem"))
    assert load(agent.address("control"), trusted).instance_id
    for key, chain in ((read("stranger.key"), read("stranger.pem")), (None, None)):
        with pytest.raises(grpc.RpcError) as caught:
            load(agent.address("control"), grpc.ssl_channel_credentials(read("one.pem"), key, chain))
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE

    for name, kind in (("cert", "pem"), ("key", "key")):
        shutil.copy(tmp_path / f"two.{kind}", tmp_path / f"live.{name}")

    def rotated() -> bool:
        with Client(agent.address("serving"), credentials=grpc.ssl_channel_credentials(read("two.pem"))) as client:
            try:
                return client.complete("a", max_tokens=1).text == "a"
            except grpc.RpcError:
                return False

    tools.wait_for(rotated, "the new certificate")
