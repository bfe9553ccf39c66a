"""Nodes of pytest-celery that are processes of this machine: no Docker."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from pytest_celery import (
    CeleryBackendCluster,
    CeleryBrokerCluster,
    CeleryTestBackend,
    CeleryTestBroker,
    CeleryTestWorker,
    CeleryWorkerCluster,
)

HERE = Path(__file__).parent


class Process:
    """Stands where pytest-celery has a container."""

    def __init__(self, command, log, **env):
        self.id = self.name = Path(log).stem
        self._command, self._log, self._env = command, log, {**os.environ, **env}
        self.start()

    def start(self):
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                cwd=HERE,
                env=self._env,
                stdout=log,
                stderr=log,
                start_new_session=True,  # one group with its children
            )

    def logs(self):
        return self._log.read_text("utf-8", "replace")

    def kill(self, name="SIGKILL"):
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.Signals[name])
            self._process.wait(30)

    def restart(self, name):
        self.kill(name)
        self._log.write_text("")  # what is waited for is of the new one
        self.start()


class ProcessNode:
    """What a node does with its process."""

    def kill(self, signal="SIGKILL", reload_container=True):
        self.container.kill(signal)

    def restart(self, reload_container=True, force=False):
        self.container.restart("SIGKILL" if force else "SIGTERM")

    def teardown(self):
        self.container.kill()


class RedisNode(ProcessNode, CeleryTestBroker, CeleryTestBackend):
    def __init__(self, folder):
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        command = [shutil.which("redis-server"), "--port", str(self.port), "--dir", str(folder)]
        super().__init__(Process(command, folder / "redis.log"))

    def config(self, *_, **__):
        url = f"redis://127.0.0.1:{self.port}/0"
        return {"url": url, "host_url": url}

    def ready(self):
        return "Ready to accept connections" in self.logs()


class WorkerNode(ProcessNode, CeleryTestWorker):
    def __init__(self, folder, url):
        command = [sys.executable, "-m", "celery", "-A", "shop", "worker", "--queues", "orders"]
        command += ["--hostname", f"{self.worker_name}@%h", "--loglevel", "INFO", "-c", "2"]
        env = {"CELERY_BROKER_URL": url, "CELERY_RESULT_BACKEND": url}
        super().__init__(Process(command, folder / "worker.log", **env), app=None)

    worker_name = "shop"

    def hostname(self):
        return f"{self.worker_name}@{socket.gethostname()}"

    def ready(self):
        return "ready." in self.logs()


def wait_for(node):
    deadline = time.monotonic() + 30
    while not node.ready():
        assert time.monotonic() < deadline, node.logs()
        time.sleep(0.05)
    return node


@pytest.fixture
def redis_node(tmp_path):
    node = RedisNode(tmp_path)
    yield wait_for(node)
    node.teardown()


@pytest.fixture
def celery_broker_cluster(redis_node):
    return CeleryBrokerCluster(redis_node)


@pytest.fixture
def celery_backend_cluster(redis_node):
    return CeleryBackendCluster(redis_node)


@pytest.fixture
def celery_worker_cluster(redis_node, tmp_path):
    node = WorkerNode(tmp_path, redis_node.config()["url"])
    yield CeleryWorkerCluster(wait_for(node))
    node.teardown()
