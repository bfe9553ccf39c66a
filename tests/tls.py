"""A server that speaks TLS, with a certificate that nobody else trusts."""

from __future__ import annotations

import shutil
import subprocess
from typing import TYPE_CHECKING

from servers import RedisServer, _free_port, redis_executable, require

if TYPE_CHECKING:
    from pathlib import Path


class TlsServer(RedisServer):
    """A `RedisServer` that can be reached over TLS, too.

    Args:
        folder: For the key and the certificate, which is for 127.0.0.1.
        *options: More options of ``redis-server``.

    Attributes:
        certificate: The certificate's file.
        tls_port: The port.
    """

    def __init__(self, folder: Path, *options: str) -> None:
        self.certificate, key = folder / "cert.pem", folder / "key.pem"
        openssl = require(shutil.which("openssl"), "openssl")
        require(_speaks_tls() or None, "a redis-server that speaks TLS (a system package)")
        request = "req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=127.0.0.1"
        command = [openssl, *request.split(), "-addext", "subjectAltName=IP:127.0.0.1"]
        command += ["-keyout", str(key), "-out", str(self.certificate)]
        subprocess.run(command, check=True, capture_output=True)
        self.tls_port = 0
        files = ["--tls-cert-file", self.certificate, "--tls-key-file", key]
        files += ["--tls-ca-cert-file", self.certificate]
        self._always = [str(each) for each in ("--tls-auth-clients", "no", *files, *options)]
        super().__init__()

    def _came_up(self) -> bool:
        """Try another port for TLS each time: somebody may have taken the last one."""
        self.tls_port = _free_port()
        self._arguments = [*self._always, "--tls-port", str(self.tls_port)]
        return super()._came_up()

    @property
    def tls_url(self) -> str:
        """The URL, without what verifies the certificate."""
        return f"rediss://127.0.0.1:{self.tls_port}/0"


def _speaks_tls() -> bool:
    """False for the server in the wheel, which refuses the first line; others refuse the second."""
    executable = redis_executable()
    if executable is None:
        return False
    lines = "tls-auth-clients no\nport none\n"
    said = subprocess.run(
        [executable, "-"], input=lines, capture_output=True, text=True, check=False, timeout=10
    )
    return "tls-auth-clients" not in said.stdout + said.stderr
