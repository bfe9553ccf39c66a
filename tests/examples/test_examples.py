"""Every example does what its README says, typed as its README says it."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import celery
import pytest
from rabbit import RabbitServer
from readme import EXAMPLES, run_readme
from servers import require


def free_port() -> str:
    """A port of this machine that nobody uses now."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return str(free.getsockname()[1])


def test_the_minimal_app(redis_url: str, tmp_path: Path) -> None:
    """Four of seven die, the killer after three starts; two are redriven after the fix."""
    said = run_readme("minimal", tmp_path, SHOP_REDIS=redis_url)
    assert "7 tasks: 3 succeeded, 4 died" in said
    assert "KeyError" in said
    assert "no such order" in said
    assert "3 of 3" in said
    assert "Redriven from orders-DLQ: 2 letters" in said
    assert "Canary: 1 of 1 succeeded" in said
    assert "KeyError" not in said.rpartition("dlq list orders-DLQ")[2]


def test_sizing_on_paper(tmp_path: Path) -> None:
    """A thousand workers break it; two hundred whose letters are exported do not."""
    large, _, small = run_readme("sizing", tmp_path).partition("200 workers")
    assert "breaks: connections is 1.1 times too much" in large
    assert "letters wait on the disks" in large
    assert "It holds." in small


def test_the_django_project(redis_url: str, tmp_path: Path) -> None:
    """Settings by namespace, tasks by autodiscovery, a policy on a shared task."""
    pytest.importorskip("django", reason="the example needs Django")
    said = run_readme("django", tmp_path, SHOP_REDIS=redis_url, PORT=(port := free_port()))
    assert "order 1: SUCCESS" in said
    assert "order 2: FAILURE" in said
    assert "there is no order 2" in said
    assert "dead_letter_policy of orders.tasks.charge" in said
    assert "Canary: 1 of 1 succeeded" in said
    pages = f"127.0.0.1:{port}/admin/login/?next=/admin/celery_dlq/deadletters/"
    # Django's server logs a request after it has answered: before or after what curl prints.
    assert f"http://{pages}" in said.splitlines()


def test_rabbitmq_with_quorum_queues(
    rabbit_server: RabbitServer, redis_url: str, tmp_path: Path
) -> None:
    """The mail waits in RabbitMQ; the killer is stopped after three starts."""
    if celery.VERSION < (5, 5):
        pytest.skip("Celery 5.4 cannot consume quorum queues")
    rabbit_server.delete_queues("orders", "mails")
    said = run_readme(
        "rabbitmq-quorum", tmp_path, SHOP_REDIS=redis_url, SHOP_RABBIT=rabbit_server.url
    )
    waited = re.search(r"the mail was sent (\d+) seconds after", said)
    assert waited is not None, said
    assert int(waited[1]) >= 2
    assert "rendering: FAILURE" in said
    assert said.count('"outcome": "worker_lost"') == 3


def test_the_pages_inside_a_web_app(redis_url: str, tmp_path: Path) -> None:
    """Mounted below a path, for those whom the app knows."""
    pytest.importorskip("starlette", reason="the example needs Starlette")
    said = run_readme("web", tmp_path, SHOP_REDIS=redis_url, PORT=free_port())
    lines = said.splitlines()
    assert "The shop. Its dead letters are at /ops/dlq/" in lines
    assert "401" in lines
    assert "ok" in lines
    assert lines[-1].endswith('"letters":{},"hour":{},"held":{},"in_force":[],"jobs":{}}')


def test_pytest_celery_on_processes(tmp_path: Path) -> None:
    """Its nodes need no Docker: a redis-server and a worker of this environment."""
    require(shutil.which("redis-server"), "redis-server on the PATH (a system package)")
    pytest.importorskip("pytest_celery", reason="the example needs pytest-celery")
    assert "4 passed" in run_readme("pytest-celery", tmp_path)


def test_pytest_celery_in_containers(tmp_path: Path) -> None:
    """The same tests with images; only where Docker runs."""
    pytest.importorskip("pytest_celery", reason="the example needs pytest-celery")
    docker = shutil.which("docker")
    if (
        docker is None
        or subprocess.run([docker, "info"], capture_output=True, check=False).returncode
    ):
        pytest.skip("Docker does not run here")
    done = subprocess.run(
        # Where its image can be built from the repository, but without the repository's tox.ini.
        [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, "-p", "no:cacheprovider", "."],
        cwd=EXAMPLES / "pytest-celery",
        env={**os.environ, "NODES": "containers", "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert "4 passed" in done.stdout, done.stdout + done.stderr


def test_every_example_has_a_readme() -> None:
    """Each example is explained."""
    folders = [path for path in EXAMPLES.iterdir() if path.is_dir()]
    assert [path.name for path in folders if not (path / "README.md").exists()] == []
