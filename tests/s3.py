"""A real S3 server on loopback."""

from __future__ import annotations

import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import quote

from waiting import poll


@contextmanager
def s3_server() -> Iterator[str]:
    """Give the address of a server that ends with the block."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        poll(lambda: answers(f"http://127.0.0.1:{port}/"), timeout_seconds=60)
        yield f"127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(30)


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2):  # noqa: S310 - our own server
            return True
    except urllib.error.HTTPError:  # a server that refuses answers as well
        return True
    except (urllib.error.URLError, OSError):
        return False


def url_of(s3: str, path: str) -> str:
    """The URL of a folder in a bucket there, with a password."""
    endpoint = quote(s3, safe="")
    return (
        f"s3://test:hush@{path}?region=us-east-1&scheme=http"
        f"&endpoint_override={endpoint}&allow_bucket_creation=true"
    )
