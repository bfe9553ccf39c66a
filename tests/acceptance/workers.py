"""Real ``celery worker`` processes for the acceptance tests."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from fork_server import ForkedProcess, run_forked
from waiting import poll

HERE = Path(__file__).parent
QUEUES = "orders,slow,patient,unguarded"
GREEN = ("gevent", "eventlet")
"""Pools of greenlets, which are not always installed."""
READ_AT_IMPORT = {"REMAP_SIGTERM", "AUTOSCALE_KEEPALIVE", "POISON_CONSTANTS"}
"""What a process that is forked from one that has loaded Celery would not see."""
PATCHES_CELERY = "observed_app"
"""By Sentry, before the other modules of Celery are imported: it is not forked either."""


BROKERS = ("redis", "classic", "quorum", "sqs")


def diagonals(*pools: str, brokers: tuple[str, ...] = BROKERS) -> pytest.MarkDecorator:
    """Run a test with each broker and each pool at least twice, and not with each pair.

    For what one of the two decides alone. Where both decide, as how a message dies, all pairs run.
    """
    pairs = [
        (broker, pool)
        for row, pool in enumerate(pools)
        for column, broker in enumerate(brokers)
        if (column - row) % len(brokers) < 2
    ]
    return pytest.mark.parametrize(("place", "pool"), pairs, indirect=["place"])


@dataclass
class Place:
    """A broker with its queues, and how to run things there."""

    name: str
    env: dict[str, str] = field(default_factory=dict)


def environment(redis_url: str, conf: dict[str, Any] | None = None, **more: str) -> dict[str, str]:
    """The environment in which the app of these tests runs."""
    return {
        **os.environ,
        "PYTHONPATH": str(HERE),
        "POISON_REDIS": redis_url.rpartition("/")[0],
        "POISON_CONF": json.dumps(conf or {}),
        "COLUMNS": "120",
        **more,
    }


def run_python(
    redis_url: str, *arguments: str | bytes, conf: dict[str, Any] | None = None, **env: str
) -> subprocess.CompletedProcess[str]:
    """Run Python in a process of its own, where the app is; wait a minute at most."""
    whole = environment(redis_url, conf, **env)
    texts = [one for one in arguments if isinstance(one, str)]
    if texts[0] == "-c" and len(texts) == len(arguments) and whole["PYTHONPATH"] == str(HERE):
        return run_forked(*texts, cwd=HERE, env=whole)
    return subprocess.run(
        [sys.executable, *arguments],
        env=whole,
        cwd=HERE,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


class Worker:
    """One worker process; a context manager that ends it in every case.

    Args:
        redis_url: Broker, results, letters and traces are in its databases.
        log: Gets what the worker prints.
        conf: Settings over those of the app.
        arguments: More of the command line.
        env: More of the environment.
        pool: Celery's name of the pool.
        app: The module of the app.
        python: The command that starts Python; by default it is forked, where that is the same.
        mingles: Ask other workers at the start what was revoked.
    """

    def __init__(
        self,
        redis_url: str,
        log: Path,
        conf: dict[str, Any] | None = None,
        arguments: tuple[str, ...] = (),
        env: dict[str, str] | None = None,
        pool: str = "prefork",
        app: str = "poison_app",
        python: tuple[str, ...] | None = None,
        *,
        mingles: bool = False,
    ) -> None:
        if pool in GREEN:
            pytest.importorskip(pool)
        self.log = log
        self._python = python or (sys.executable,)
        self.command = [
            "-A",
            app,
            "worker",
            "--concurrency",
            "2",
            "--pool",
            pool,
            "--queues",
            QUEUES,
            "--loglevel",
            "INFO",
            "--without-gossip",
            *([] if mingles else ["--without-mingle"]),
            *arguments,
        ]
        conf = {"dlq_spool_dir": str(log.parent / "spool"), **(conf or {})}
        self._env = environment(redis_url, conf, **(env or {}))
        usual = self._env["PYTHONPATH"] == str(HERE) and not READ_AT_IMPORT & self._env.keys()
        usual = usual and python is None and app != PATCHES_CELERY
        self._forked = usual and pool in ("prefork", "threads", "solo")
        self.process: subprocess.Popen[bytes] | ForkedProcess

    def __enter__(self) -> Worker:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self, *, wait: bool = True) -> Worker:
        """Start it and, by default, wait until it consumes."""
        begun = len(self.output)
        if self._forked:
            self.process = ForkedProcess(self.command, cwd=HERE, env=self._env, log=self.log)
        else:
            with self.log.open("ab") as output:
                self.process = subprocess.Popen(
                    [*self._python, "-m", "celery", *self.command],
                    env=self._env,
                    cwd=HERE,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                    preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CORE, (0, 0)),  # noqa: PLW1509
                )
        if not wait:
            return self
        poll(
            lambda: "ready." in self.output[begun:] or self.process.poll() is not None,
            timeout_seconds=30,
        )
        # Its first message may have killed it already.
        assert "ready." in self.output[begun:], self.output
        return self

    def lives_until(self, until: Callable[[], bool], *, timeout_seconds: float) -> bool:
        """Wait for something, or for the worker's death; whether it was the first."""
        poll(lambda: until() or self.process.poll() is not None, timeout_seconds=timeout_seconds)
        return until()

    def stop(self) -> None:
        """Warm shutdown, and if that takes too long the hard way."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(15)
            except subprocess.TimeoutExpired:
                self.kill()
        self._end_group()

    def kill(self) -> None:
        """SIGKILL the whole worker, pool children too."""
        self._end_group()
        self.process.wait(10)

    def end(self) -> None:
        """End it at once: what it still does, nobody looks at. But coverage is written first."""
        if "COVERAGE_PROCESS_CONFIG" in os.environ:
            self.process.send_signal(signal.SIGQUIT)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(10)
        self.kill()

    @property
    def output(self) -> str:
        """All it printed so far."""
        return self.log.read_text("utf-8", "replace") if self.log.exists() else ""

    def _end_group(self) -> None:
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            if self.process.poll() is None:  # it has no group of its own yet
                self.process.kill()
