"""A Redis Cluster of one's own: masters, and replicas that take over."""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

import redis
from redis.crc import key_slot
from servers import RedisServer

if TYPE_CHECKING:
    from types import TracebackType

_SLOTS = 16384
_READY_SECONDS = 30.0


class ClusterServers:
    """Nodes on free ports of 127.0.0.1 that share the slots.

    Args:
        masters: Number of masters.
        replicas: Number of replicas of each master.

    Example:
        ``with ClusterServers() as cluster: connect(cluster.url, 2.0)``
    """

    def __init__(self, masters: int = 3, replicas: int = 0) -> None:
        self._stack = ExitStack()
        self._replicas = replicas
        # A command that waits for a replica ends at a tick of the server.
        options = ("--cluster-enabled", "yes", "--cluster-node-timeout", "1500", "--hz", "100")
        self.masters = [RedisServer(*options) for _ in range(masters)]
        self.replicas = [RedisServer(*options) for _ in range(masters * replicas)]

    def __enter__(self) -> ClusterServers:
        with ExitStack() as stack:
            for server in self._all():
                stack.enter_context(server)
            self._meet()
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
        """The URLs of all masters."""
        hosts = (f"redis+cluster://127.0.0.1:{server.port}" for server in self.masters)
        return ";".join(hosts)

    def flush(self) -> None:
        """Delete all keys, once every node takes writes: a test before may have ended one."""
        self._wait_until("cluster_state", "ok")
        for server in self.masters:
            server.client().flushall()

    def holder(self, key: str) -> RedisServer:
        """The master that holds a key, by what the nodes say."""
        slot = key_slot(key.encode())
        client = next(s.client() for s in self._all() if s.is_running)
        for low, high, master, *_replicas in client.execute_command("CLUSTER SLOTS"):
            if low <= slot <= high:
                return next(s for s in self._all() if s.port == master[1])
        raise LookupError(f"no master holds {key!r}")

    def move(self, key: str) -> None:
        """Move the slot of a key, with all of its keys, to another master."""
        slot, source = key_slot(key.encode()), self.holder(key)
        target = next(s for s in self.masters if s is not source)
        self.begin_move(slot, source, target)
        self.end_move(slot, source, target)

    def begin_move(self, slot: int, source: RedisServer, target: RedisServer) -> None:
        """Let a slot be on its way: the nodes answer with ASK for keys that are not there."""
        to, by = self._id(target), self._id(source)
        target.client().execute_command("CLUSTER SETSLOT", slot, "IMPORTING", by)
        source.client().execute_command("CLUSTER SETSLOT", slot, "MIGRATING", to)

    def end_move(self, slot: int, source: RedisServer, target: RedisServer) -> None:
        """Move the keys, then the slot."""
        client = source.client()
        while keys := client.execute_command("CLUSTER GETKEYSINSLOT", slot, 100):
            client.execute_command("MIGRATE", "127.0.0.1", target.port, "", 0, 5000, "KEYS", *keys)
        for server in (target, source, *(s for s in self.masters if s not in (source, target))):
            server.client().execute_command("CLUSTER SETSLOT", slot, "NODE", self._id(target))

    def wait_for_takeover(self, key: str, lost: RedisServer) -> None:
        """Wait until another node holds a key, and takes writes."""
        deadline = time.monotonic() + _READY_SECONDS
        while time.monotonic() < deadline:
            holder = self.holder(key)
            if holder is not lost and _info(holder).get("cluster_state") == "ok":
                return
            time.sleep(0.05)
        raise RuntimeError("no replica took over")

    def _all(self) -> list[RedisServer]:
        return [*self.masters, *self.replicas]

    def _id(self, server: RedisServer) -> str:
        return server.client().execute_command("CLUSTER MYID").decode()

    def _meet(self) -> None:
        first, count = self.masters[0], len(self.masters)
        for index, server in enumerate(self.masters):
            slots = range(_SLOTS * index // count, _SLOTS * (index + 1) // count)
            server.client().execute_command("CLUSTER ADDSLOTS", *slots)
        for epoch, server in enumerate(self._all(), 1):
            server.client().execute_command("CLUSTER SET-CONFIG-EPOCH", epoch)
            if server is not first:
                server.client().execute_command("CLUSTER MEET", "127.0.0.1", first.port)
        self._wait_until("cluster_known_nodes", len(self._all()))
        for index, server in enumerate(self.replicas):
            master = self._id(self.masters[index // self._replicas])
            server.client().execute_command("CLUSTER REPLICATE", master)
        self._wait_until("cluster_state", "ok")
        for server in self.replicas:
            self._wait_for_replica(server)

    def _wait_until(self, name: str, value: object) -> None:
        deadline = time.monotonic() + _READY_SECONDS
        for server in self._all():
            while _info(server).get(name) != str(value):
                if time.monotonic() > deadline:
                    raise RuntimeError(f"expected {name} to be {value} at every node")
                time.sleep(0.02)

    def _wait_for_replica(self, server: RedisServer) -> None:
        deadline = time.monotonic() + _READY_SECONDS
        client: redis.Redis = server.client()
        while client.info("replication").get("master_link_status") != "up":
            if time.monotonic() > deadline:
                raise RuntimeError("a replica does not follow its master")
            time.sleep(0.02)


def _info(server: RedisServer) -> dict[str, str]:
    """What a node says of the cluster."""
    said = server.client().execute_command("CLUSTER INFO")
    if isinstance(said, dict):  # redis-py has taken it apart
        return said
    lines = said.decode().splitlines()
    return dict(line.split(":", 1) for line in lines if ":" in line)
