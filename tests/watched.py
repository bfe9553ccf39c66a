"""A master and its replica that a Sentinel watches, as in production."""

from __future__ import annotations

import subprocess
import tempfile
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import redis
from servers import RedisServer, _free_port, redis_executable, require
from waiting import poll

if TYPE_CHECKING:
    from types import TracebackType

NAME = "shop"
"""The name by which the Sentinel knows the master."""


class WatchedServers:
    """A master, a replica and a Sentinel on free ports of 127.0.0.1.

    Example:
        ``with WatchedServers() as servers: Connection(servers.url, transport_options=OPTIONS)``
    """

    def __init__(self) -> None:
        self.master = RedisServer()
        self.replica = RedisServer()
        self.port = 0
        self._stack = ExitStack()

    def __enter__(self) -> WatchedServers:
        with ExitStack() as stack:
            stack.enter_context(self.master)
            stack.enter_context(self.replica)
            self.replica.client().replicaof("127.0.0.1", str(self.master.port))
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="sentinel-"))
            self._watch(stack, Path(folder, "sentinel.conf"))
            poll(self._knows_the_replica, timeout_seconds=30, every_seconds=0.1)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stack.close()

    @property
    def url(self) -> str:
        """The URL of the Sentinel."""
        return f"sentinel://127.0.0.1:{self.port}/0"

    @property
    def options(self) -> dict[str, Any]:
        """The transport options that go with the URL."""
        return {"master_name": NAME}

    def fail_over(self) -> None:
        """Let the replica take over, and wait until it has."""
        poll(self._begins_to_fail_over, timeout_seconds=30, every_seconds=0.1)
        self.wait_for_takeover()

    def wait_for_takeover(self) -> None:
        """Wait until the replica is the master."""
        poll(self._replica_is_master, timeout_seconds=60, every_seconds=0.1)

    def _watch(self, stack: ExitStack, config: Path) -> None:
        server = require(redis_executable(), "redis-server (a system package)")
        self.port = _free_port()
        config.write_text(
            f"port {self.port}\nbind 127.0.0.1\n"
            f"sentinel monitor {NAME} 127.0.0.1 {self.master.port} 1\n"
            f"sentinel down-after-milliseconds {NAME} 1000\n"
            f"sentinel failover-timeout {NAME} 3000\n"
        )
        process = subprocess.Popen([server, config, "--sentinel"], stdout=subprocess.DEVNULL)
        stack.callback(process.wait)
        stack.callback(process.terminate)

    def _knows_the_replica(self) -> bool:
        with suppress(redis.RedisError):
            slaves = self._ask("SENTINEL", "SLAVES", NAME)
            info = self.replica.client().info("replication")
            return bool(slaves) and info.get("master_link_status") == "up"
        return False

    def _begins_to_fail_over(self) -> bool:
        with suppress(redis.ResponseError):  # it promotes no replica that it has only heard of
            self._ask("SENTINEL", "FAILOVER", NAME)
            return True
        return False

    def _replica_is_master(self) -> bool:
        with suppress(redis.RedisError):  # Sentinel closes the connections of all clients
            _host, port = self._ask("SENTINEL", "GET-MASTER-ADDR-BY-NAME", NAME)
            role = self.replica.client().info("replication")["role"]
            return int(port) == self.replica.port and role == "master"
        return False

    def _ask(self, *command: str) -> Any:
        with redis.Redis(port=self.port) as sentinel:
            return sentinel.execute_command(*command)
