"""The base of what is kept in Redis.

A feature's own part lies in its folder, with its keys and scripts::

    class Holds(Part):
        lua = "celery_dlq.features.hold"  # its scripts are in the folder `lua` of this package

        def all(self) -> list[Hold]:
            texts = self._client.hvals(self._keys.app("holds"))  # {prefix}:{app}:holds
            ...

``store.part(Holds)`` makes it once, on the connections of the store, whose errors are
`StoreUnavailable`. A key on the slot of a dead-letter queue is ``self._keys.of(queue, "notes")``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, ClassVar

from redis.exceptions import NoScriptError

from celery_dlq.letters.record import from_micros
from celery_dlq.store.keys import Keys, spelled, text_of
from celery_dlq.store.pipelined import Command
from celery_dlq.store.scripts import script_text

if TYPE_CHECKING:
    from celery_dlq.store.store import Store

_CLOCK_SECONDS = 1.0
_QUEUES_PER_WRITE = 50
"""Few, so that Redis serves others in between: it may read two large letters per queue."""


class Part:
    """Base class with the clients of a store, the key names, the scripts and the clock."""

    lua: ClassVar[str] = "celery_dlq.store"
    """The package whose folder ``lua`` has the scripts."""

    def __init__(self, store: Store, keys: Keys | None = None) -> None:
        self._store = store
        self._client = store.client
        self._connection = store.connection
        self._keys = keys or store.keys

    def now(self) -> datetime:
        """Return the time of Redis, the clock that all machines share; asked once a second."""
        asked_at, micros = self._store.clock
        passed = time.monotonic() - asked_at
        if passed > _CLOCK_SECONDS:
            seconds, rest = self._client.time()
            micros, passed = seconds * 1_000_000 + rest, 0.0
            self._store.clock = time.monotonic(), micros
        return from_micros(micros + int(passed * 1e6))

    def _send_command(self, *command: Any) -> Any:
        """Send one command on the connection that is open in a worker, which seldom has another."""
        ask = (
            self._connection.send_and_wait
            if self._connection.is_open
            else self._client.execute_command
        )
        return ask(*command)

    def _run_script(self, name: str, *args: Any, queue: str | None = None, **keys: str) -> Any:
        """Run a script on the keys that its header names: of the app, of a queue, or given."""
        script = script_text(name, self.lua)
        places = self._key_places(name, queue, keys)
        try:
            return self._client.evalsha(script.digest, len(places), *places, *args)
        except NoScriptError:
            return self._client.eval(script.text, len(places), *places, *args)

    def _written(
        self,
        name: str,
        *args: Any,
        before: Command | None = None,
        again: Sequence[Any] | None = None,
        queue: str | None = None,
        **keys: str,
    ) -> Any:
        """Run a script as `_run_script` does, in order with the process's unanswered writes."""
        script, places = script_text(name, self.lua), self._key_places(name, queue, keys)
        return self._connection.call_script(script, places, *args, before=before, again=again)

    def _command(self, name: str, *args: Any, queue: str | None = None, **keys: str) -> Command:
        """The command that runs a script, for `PipelinedConnection.send_unanswered`."""
        return script_text(name, self.lua).command(self._key_places(name, queue, keys), *args)

    def _key_places(self, name: str, queue: str | None, keys: dict[str, str]) -> list[str]:
        of = () if queue is None else (queue,)
        return self._keys.places(script_text(name, self.lua).keys, *of, **keys)


class QueueNames(Part):
    """Base class of the parts that know which dead-letter queues there are."""

    def names(self) -> list[str]:
        """Return the names of all dead-letter queues that ever had a letter, sorted."""
        return sorted(map(text_of, self._send_command("SMEMBERS", self._keys.queues())))

    def has_queue(self, name: str) -> bool:
        """Return True if this dead-letter queue ever had a letter; there may be thousands."""
        return bool(self._send_command("SISMEMBER", self._keys.queues(), spelled(name)))


def of_each(
    client: Any,
    names: Sequence[str],
    *commands: Callable[[Any, str], object],
    at_once: int = _QUEUES_PER_WRITE,
) -> Iterator[tuple[str, list[Any]]]:
    """Send the same commands for many queues, in pipelines."""
    for start in range(0, len(names), at_once):
        some = names[start : start + at_once]
        pipe = client.pipeline(transaction=False)
        for name in some:
            for command in commands:
                command(pipe, name)
        replies = iter(pipe.execute())
        for name in some:
            yield name, [next(replies) for _ in commands]
