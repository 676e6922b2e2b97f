"""Server credentials from files, read again when they change."""

from __future__ import annotations

from pathlib import Path

import grpc

from decodefleet.config import TLS
from decodefleet_agent.server.errors import StartupError


def server_credentials(tls: TLS) -> grpc.ServerCredentials:
    """Asks the files at each new connection. Raises StartupError if they cannot be read now."""
    paths = [Path(path) for path in (tls.cert_file, tls.key_file, tls.client_ca_file) if path is not None]

    def stamp() -> tuple[int, ...]:
        return tuple(path.stat().st_mtime_ns for path in paths)

    def read() -> grpc.ServerCertificateConfiguration:
        certificate, key, *authority = [path.read_bytes() for path in paths]
        return grpc.ssl_server_certificate_configuration([(key, certificate)], root_certificates=authority[0] if authority else None)

    try:
        known = stamp()
        first = read()
    except OSError as error:
        raise StartupError(f"tls: {error.filename} cannot be read: {error.strerror}") from error

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        nonlocal known
        try:
            now = stamp()
            if now == known:
                return None
            fresh = read()
        except OSError:  # the files are being replaced; the next connection looks again
            return None
        known = now
        return fresh

    return grpc.dynamic_ssl_server_credentials(first, fetch, require_client_authentication=tls.client_ca_file is not None)
