"""An Amazon SQS for tests: moto's server, a process of its own on a free port.

Where it deviates from SQS, as of moto 5.2:

- It takes the 12 hours of a message's visibility from its sending, SQS from its receipt.
- It deletes a message by the receipt of any delivery. In SQS only the latest one counts.
- It knows a deduplication id only while the message is in its queue, SQS for five minutes.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import urllib.error
import urllib.request
from typing import Any

from servers import _free_port
from waiting import poll

_START_SECONDS = 60.0
_REGION = "us-east-1"


def sqs_module() -> str | None:
    """What runs the server; ``None`` if it, or what kombu needs for SQS, is not installed."""
    needed = ("boto3", "moto", "flask", "flask_cors", "pycurl")
    return "moto.server" if all(map(importlib.util.find_spec, needed)) else None


class SqsServer:
    """A server; a context manager that ends it."""

    def __init__(self) -> None:
        self.port = _free_port()
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> SqsServer:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        poll(self._answers, timeout_seconds=_START_SECONDS)
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait(30)

    @property
    def url(self) -> str:
        """The broker's URL as Celery reads it."""
        return f"sqs://key:secret@127.0.0.1:{self.port}//"

    @property
    def options(self) -> dict[str, Any]:
        """What ``broker_transport_options`` must say, and what keeps tests short."""
        return {
            "region": _REGION,
            "is_secure": False,
            "wait_time_seconds": 1,
            "polling_interval": 0.1,
        }

    def client(self) -> Any:
        """A client of SQS."""
        import boto3

        return boto3.client(
            "sqs",
            region_name=_REGION,
            aws_access_key_id="key",
            aws_secret_access_key="secret",
            endpoint_url=f"http://127.0.0.1:{self.port}",
        )

    def queue(self, name: str, **attributes: object) -> str:
        """Make a queue; return its URL."""
        texts = {
            key: value if isinstance(value, str) else json.dumps(value)
            for key, value in attributes.items()
        }
        url: str = self.client().create_queue(QueueName=name, Attributes=texts)["QueueUrl"]
        return url

    def attributes(self, url: str) -> dict[str, str]:
        """All attributes of a queue: how many messages are visible, invisible, delayed."""
        found: dict[str, str] = self.client().get_queue_attributes(
            QueueUrl=url, AttributeNames=["All"]
        )["Attributes"]
        return found

    def reset(self) -> None:
        """Delete all queues."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/moto-api/reset", method="POST"
        )
        with urllib.request.urlopen(request, timeout=10):  # noqa: S310
            pass

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/moto-api/", timeout=2):
                return True
        except urllib.error.HTTPError:
            return True
        except (urllib.error.URLError, OSError):
            return False
