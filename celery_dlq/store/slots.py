"""Writes to a cluster that do not wait for replies: a connection per dead-letter queue."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import redis

from celery_dlq.errors import StoreUnavailable
from celery_dlq.store.cluster import LazyCluster
from celery_dlq.store.connect import new_connection
from celery_dlq.store.pipelined import (
    ELSEWHERE,
    Command,
    OutageBackoff,
    PipelinedConnection,
    Repetition,
    commands_of,
)

_MOST_CONNECTIONS = 256


class ClusterConnection(PipelinedConnection):
    """A `PipelinedConnection` to a cluster.

    Each hash tag (a dead-letter queue) has a connection of its own, so that a reply confirms all
    that was written to its slot. When a node refuses or is gone, redis-py's client finds the one
    that holds the slot now; what is not confirmed is written again through it.
    """

    def __init__(self, client: LazyCluster, url: str, **options: Any) -> None:
        super().__init__(client, url, **options)
        self.is_replicated = True
        self._slots: OrderedDict[str, _SlotConnection] = OrderedDict()

    def send_unanswered(
        self, commands: Sequence[Command], again: Sequence[Repetition] = (), *, keep: bool = False
    ) -> bool:
        """Write commands, each to its slot; see `PipelinedConnection.send_unanswered`."""
        slots: dict[str, tuple[list[Command], list[Command]]] = {}
        for which, some in enumerate((commands, commands_of(again))):
            for command in some:
                slots.setdefault(first_key(command), ([], []))[which].append(command)
        written = True
        for key, (now, later) in slots.items():
            written &= self._send_to(self._connection_of_slot(key), now, later, keep=keep)
        return written

    def probe_writes(self, commands: Sequence[Repetition]) -> bool:
        """Write each command to its slot and wait; see `PipelinedConnection.probe_writes`."""
        accepted = []
        for command in commands_of(commands):
            slot = self._connection_of_slot(first_key(command))
            accepted.append(slot.probe_writes([command]) or self._found_again(slot, [command]))
        return all(accepted)

    @property
    def is_open(self) -> bool:
        """True if connected to any node."""
        return any(slot.is_open for slot in self._slots.values())

    def send_and_wait(
        self, *command: Any, before: Command | None = None, again: Command | None = None
    ) -> Any:
        """Send one command and wait for its reply; see `PipelinedConnection.send_and_wait`."""
        if before is not None:
            self.send_and_wait(*before)
        slot = self._connection_of_slot(first_key(command))
        try:
            return slot.send_and_wait(*command, again=again)
        except StoreUnavailable as exc:
            if not isinstance(exc.__cause__, (*ELSEWHERE, redis.ConnectionError, OSError)):
                raise
            if not self._found_again(slot):
                raise
        try:
            return self._client.execute_command(*(again or command))
        except StoreUnavailable as exc:
            if isinstance(exc.__cause__, (redis.ConnectionError, redis.TimeoutError)):
                slot.search.failed(exc)
            raise

    def wait_for_replica(self, key: str) -> None:
        """Wait for a replica of the slot's master; see `PipelinedConnection.wait_for_replica`."""
        self._connection_of_slot(key).wait_for_replica(key)

    def close(self) -> None:
        """Wait until everything is executed, and disconnect. Never raises."""
        with self._lock:
            while self._slots:
                slot = self._slots.popitem()[1]
                slot.close()

    def _send_to(
        self,
        slot: _SlotConnection,
        commands: Sequence[Command],
        again: Sequence[Command],
        *,
        keep: bool,
    ) -> bool:
        if slot.send_unanswered(commands, again, keep=keep):
            return True
        # With `keep`, they are among the slot's own now.
        return self._found_again(slot, () if keep else again or commands)

    def _found_again(self, slot: _SlotConnection, commands: Sequence[Command] = ()) -> bool:
        """Write what is not confirmed, and these commands, wherever the slot is now."""
        with self._lock:
            if slot.search.is_open:
                return False
            try:
                for pending in slot.pending:
                    while pending:  # others may add to them meanwhile
                        self._client.execute_command(*pending[0])
                        pending.popleft()
                for command in commands:
                    self._client.execute_command(*command)
            except StoreUnavailable as exc:
                slot.search.failed(exc)
                self._log_failure(exc)
                return False
            if self._slots.pop(slot.key, None) is not None:
                slot.close()
            return True

    def _connection_of_slot(self, key: str) -> _SlotConnection:
        tag = key[key.find("{") : key.find("}") + 1] or key
        slot = self._slots.get(tag)
        if slot is None:
            with self._lock:
                while len(self._slots) >= _MOST_CONNECTIONS:
                    self._slots.popitem(last=False)[1].close()
                slot = self._slots[tag] = _SlotConnection(self._client, self._url, tag)
        return slot


class _SlotConnection(PipelinedConnection):
    """A connection to the node of one slot."""

    def __init__(self, client: LazyCluster, url: str, key: str) -> None:
        super().__init__(client, url)
        self.is_replicated = True
        self.key = key
        self.search = OutageBackoff()
        self._question = ("EXISTS", key)  # answered by the slot's own node alone

    @property
    def pending(self) -> Any:
        """Commands that may not have been executed."""
        return self.unconfirmed, self.kept

    def _new_connection(self) -> Any:
        return new_connection(self._client.client_for(self.key).connection_pool)


def first_key(command: Command) -> str:
    """The first key of a command."""
    return str(command[3] if command[0] in ("EVAL", "EVALSHA") else command[1])
