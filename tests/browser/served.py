"""Real processes beside the browser: ``celery dlq web``, and a worker."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from servers import _free_port
from waiting import poll

HERE = Path(__file__).parent


def environment(redis_url: str, conf: dict[str, Any] | None = None) -> dict[str, str]:
    """The environment in which the shop's app runs."""
    return {
        **os.environ,
        "PYTHONPATH": str(HERE),
        "SHOP_REDIS": redis_url.rpartition("/")[0],
        "SHOP_CONF": json.dumps(conf or {}),
    }


class Process:
    """One ``celery -A shop_app …``; a context manager that ends it in every case."""

    def __init__(
        self, redis_url: str, log: Path, *command: str, conf: dict[str, Any] | None = None
    ) -> None:
        self.log = log
        self._command = [sys.executable, "-m", "celery", "-A", "shop_app", *command]
        self._env = environment(redis_url, conf)
        self.process: subprocess.Popen[bytes]

    def __enter__(self) -> Any:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start it and wait until it is ready."""
        begun = len(self.output)
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                self._command,
                env=self._env,
                cwd=HERE,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        poll(
            lambda: self.ready(self.output[begun:]) or self.process.poll() is not None,
            timeout_seconds=60,
            every_seconds=0.05,
        )
        assert self.process.poll() is None, self.output

    def ready(self, said: str) -> bool:
        """True if it has said that it is."""
        return "ready." in said

    def stop(self) -> float:
        """SIGTERM; the seconds that it took to end."""
        begun = time.monotonic()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(10)
        return time.monotonic() - begun

    @property
    def output(self) -> str:
        """All it printed so far."""
        return self.log.read_text("utf-8", "replace") if self.log.exists() else ""


class Worker(Process):
    """A worker of all queues of the shop."""

    def __init__(self, redis_url: str, log: Path, conf: dict[str, Any] | None = None) -> None:
        queues = ("--queues", "orders,mails,reports")
        pool = ("--pool", "threads", "--concurrency", "4", "--without-gossip", "--without-mingle")
        super().__init__(redis_url, log, "worker", *queues, *pool, "--loglevel", "INFO", conf=conf)


class Pages(Process):
    """The pages of the shop's letters, at one port as often as it is started."""

    def __init__(
        self,
        redis_url: str,
        log: Path,
        *options: str,
        conf: dict[str, Any] | None = None,
        changes: bool = True,
    ) -> None:
        self.port = 0
        may = ("--allow-changes",) if changes else ()
        super().__init__(redis_url, log, "dlq", "web", *may, *options, conf=conf)
        self._base = self._command

    @property
    def url(self) -> str:
        """The address of the overview, without the slash at its end."""
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start it at its port; the first time at a free one, which others may take meanwhile."""
        for _ in range(0 if self.port else 5):
            port = _free_port()
            self._command = [*self._base, "--port", str(port)]
            try:
                super().start()
            except AssertionError:
                if "to be free" not in self.output:
                    raise
            else:
                self.port = port
                return
        super().start()

    def ready(self, said: str) -> bool:
        """True if the port is served."""
        return "Serving dead letters" in said

    def get(self, path: str, method: str = "GET") -> tuple[int, dict[str, str], bytes]:
        """Ask for a page without a browser: status, headers by lower-case name, body."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            connection.request(method, path)
            answer = connection.getresponse()
            headers = {name.lower(): value for name, value in answer.getheaders()}
            return answer.status, headers, answer.read()
        finally:
            connection.close()
