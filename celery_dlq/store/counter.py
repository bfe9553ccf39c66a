"""Counting deliveries in Redis: one write per healthy task, without waiting."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import datetime
from functools import partial
from itertools import chain
from operator import attrgetter, itemgetter
from urllib.parse import quote, unquote
from uuid import uuid4

from celery_dlq import timing
from celery_dlq.letters.record import Delivery, Outcome, from_micros, to_micros
from celery_dlq.store.keys import Keys, compact
from celery_dlq.store.pipelined import Command, PipelinedConnection
from celery_dlq.store.scripts import script_text
from celery_dlq.store.worker_records import Count, CountStatus, MessageKey

HISTORY_LIMIT = 50
"""Maximum number of deliveries kept per message; of a task id, the newest messages are kept."""

RETRIED_KEPT_SECONDS = 600.0
"""How long the late copy of a message that was retried is recognised after its retry ended."""

SCRIPTS = ("count", "count_first", "died", "ended", "forget", "heartbeat")
"""The counter's scripts; they are sent over its connection."""

_ORDER = attrgetter("started_at", "retries", "number")

_RETRIED = 1  # the kind of an end: see ended.lua
_Done = tuple[MessageKey, Delivery, bool]
"""A message that is done, its last delivery, and whether that was its first."""


class DeliveryCounter:
    """Counts the deliveries of messages."""

    _CLEAN_UPS_PER_WRITE = 32
    _MOST_AT_ONCE = 128
    _MAX_CLEAN_UPS = 4096  # expiry cleans up the rest
    _MAX_REDRIVES = 100  # counted between two writes

    def __init__(self, connection: PipelinedConnection, keys: Keys, ttl_seconds: float) -> None:
        self.connection = connection
        self._keys = keys
        self._ttl = int(ttl_seconds * 1000)
        self._stale = int(timing.current.counter_stale * 1000)
        self._beat_seconds = timing.current.counter_beat
        self._count = script_text("count")
        self._count_first = script_text("count_first")
        self._died = script_text("died")
        self._ended = script_text("ended")
        self._forget = script_text("forget")
        self._heartbeat_script = script_text("heartbeat")
        # A restarted container has the same pid and name as the one that died.
        self._token = uuid4().hex[:8]
        self._worker = ""
        self._alive_at: dict[str, float] = {}
        self._done: deque[_Done] = deque(maxlen=self._MAX_CLEAN_UPS)
        self._successes: Counter[str] = Counter()
        self._unprobed: set[str] = set()  # queues with writes since the last reply
        self._lock = threading.Lock()

    def count_first(self, key: MessageKey, delivery: Delivery) -> bool:
        """Write the start, and now and then the clean-ups of finished messages."""
        # No helpers: every task pays for this.
        run, place, start = self._keys.run(key), key.place, self._start_text(delivery)
        count = ("EVAL", self._count_first.text, 1, run, place, start, self._ttl, HISTORY_LIMIT)
        if len(self._done) >= self._CLEAN_UPS_PER_WRITE:
            self._clean_up()
        beat = self._beat_if_due(key.dead_letter_queue)
        again = partial(self._ended_command, key, place, 1, "", 2, start)
        return self.connection.send_unanswered([*beat, count], [again])

    def count_delivery(
        self,
        key: MessageKey,
        delivery: Delivery,
        limit: int | None,
        *,
        known: int = 0,
        here: bool = False,
        waited_seconds: float | None = None,
        alone: bool = True,
        unless_late: bool = False,
    ) -> Count:
        """Count a delivery and wait for the reply, once Redis knows what is done here."""
        self._forget_all()
        waited = -1 if waited_seconds is None else int(waited_seconds * 1000)
        queue = key.dead_letter_queue
        keys = [self._keys.run(key), self._keys.workers(queue), self._keys.late_copies(queue)]
        args = (
            key.place,
            limit or 0,
            self._start_text(delivery),
            self._ttl,
            HISTORY_LIMIT,
            self._stale,
            waited,
            known,
            int(alone),
            int(unless_late),
            int(here),
            key.letter_id,
        )
        state, number, suspect = self.connection.call_script(
            self._count, keys, *args, 0, again=(*args, 1)
        )
        if beat := self._beat_if_due(queue):
            self.connection.send_unanswered(beat)
        return Count(CountStatus(state), number, bool(suspect))

    def record_end(self, key: MessageKey, delivery: Delivery, *, charged: bool = True) -> None:
        """Record how a delivery ended; with ``charged=False`` take its count back.

        An uncharged delivery without an outcome never started: no record of it is kept.
        A start that is not on record, and was charged, is recorded now, unless the message was
        retried or is dead: nobody will ask for it again. Never raises.
        """
        end = ""
        if charged or delivery.outcome is not None:
            end = compact(delivery.to_json())
        # A message that was retried does not come back: its run may be deleted by now.
        comes_back = charged and delivery.outcome is not Outcome.RETRIED
        kind = charged + comes_back
        start = self._start_text(delivery)
        command = self._ended_command(key, key.place, delivery.number, end, kind, start)
        self._unprobed.add(key.dead_letter_queue)
        commands = [command]
        if comes_back and self.connection.probe_writes(commands):
            return
        self.connection.send_unanswered(commands, commands, keep=True)

    def heartbeat(self, dead_letter_queues: Iterable[str]) -> None:
        """Record with the next `flush` that this worker is alive, for the counters of these queues.

        Never raises.
        """
        if self._worker:
            self._unprobed.update(dead_letter_queues)
            # Forgets queues whose messages no longer run here.
            self._alive_at = dict.fromkeys(self._unprobed, time.monotonic())

    def heartbeats(self, dead_letter_queues: Iterable[str]) -> list[Command]:
        """Return the commands of such a heartbeat, to send them over another connection."""
        return [self._heartbeat(name) for name in dead_letter_queues] if self._worker else []

    def _beat_if_due(self, dead_letter_queue: str) -> list[Command]:
        """A heartbeat if due: without one, the start would look like a dead worker's."""
        self._unprobed.add(dead_letter_queue)
        at, now = self._alive_at.get(dead_letter_queue), time.monotonic()
        if at is not None and now - at < self._beat_seconds:
            return []
        self._alive_at[dead_letter_queue] = now
        return [self._heartbeat(dead_letter_queue)]

    def _heartbeat(self, dead_letter_queue: str) -> Command:
        keys = [self._keys.workers(dead_letter_queue)]
        return self._heartbeat_script.command(keys, self._worker)

    def succeeded(self, key: MessageKey, delivery: Delivery, *, first: bool = False) -> None:
        """Delete the counts of a message that is done; may be postponed until `flush`.

        Another message that runs under the same task id keeps its count. Never raises.
        """
        # What it needs is made with many others: here every task would pay for it.
        self._done.append((key, delivery, first))

    def record_death(self, key: MessageKey) -> None:
        """Delete the counts of a message and record that it is dead. Never raises.

        For a message whose letter is elsewhere: in the spool, or in another dead-letter queue.
        """
        keys = [self._keys.run(key), self._keys.late_copies(key.dead_letter_queue)]
        commands = [self._died.command(keys, key.place, key.letter_id, self._ttl)]
        self._unprobed.add(key.dead_letter_queue)
        self.connection.send_unanswered(commands, commands, keep=True)

    def is_dead(self, key: MessageKey) -> bool:
        """True if a letter of this message was stored beside these counts, not long ago."""
        marks = self._keys.late_copies(key.dead_letter_queue)
        return self.connection.send_and_wait("ZSCORE", marks, key.letter_id) is not None

    def redrive_succeeded(self, redrive_id: str) -> None:
        """Count a success for a redrive; may be postponed until `flush`. Never raises."""
        if len(self._successes) < self._MAX_REDRIVES or redrive_id in self._successes:
            self._successes[redrive_id] += 1

    def history(self, key: MessageKey) -> tuple[Delivery, ...]:
        """Return all recorded deliveries of a task, over its retries, oldest first."""
        return _deliveries(self._read_fields(key), key)

    def shares_id(self, key: MessageKey) -> bool:
        """True if another message with its task id is under way, or was beside this one."""
        fields = self._read_fields(key)
        return b"shared" in fields or any(
            not (some and some[-1].outcome is Outcome.RETRIED)
            for place, some in _by_place(fields).items()
            if place and place.partition(".")[2] != key.publication
        )

    def last_sign(self, key: MessageKey, delivery: Delivery) -> datetime | None:
        """When the worker that started a delivery last gave a sign of life; ``None``: unknown."""
        place = f"start:{key.place}:{delivery.number}"
        start = self.connection.send_and_wait("HGET", self._keys.run(key), place) or b""
        workers = self._keys.workers(key.dead_letter_queue)
        millis = self.connection.send_and_wait("ZSCORE", workers, start.partition(b"|")[2])
        return None if millis is None else from_micros(int(float(millis) * 1000))

    def flush(self) -> None:
        """Send the clean-ups and heartbeats, and see if Redis accepts writes."""
        while len(self._done) > self._MOST_AT_ONCE and self._clean_up():
            pass
        counts, self._successes = self._successes, Counter()
        if counts:  # successes of redrives since the last flush
            key = self._keys.successes()
            self.connection.send_unanswered([("HINCRBY", key, i, n) for i, n in counts.items()])
        names, self._unprobed = self._unprobed, set()
        done, commands = self._take_done()
        # A heartbeat is the smallest write like a count.
        commands += map(self._heartbeat, names)
        if commands and not self.connection.probe_writes(commands):
            self._unprobed |= names
            self._done.extendleft(reversed(done))

    def close(self) -> None:
        """Flush, for some seconds if Redis is away, and close the connection. Never raises.

        A failover in a deploy would else leave starts charged that the deploy ended.
        """
        until = time.monotonic() + timing.current.last_try
        self.flush()
        while (self._done or not self.connection.confirm()) and time.monotonic() < until:
            time.sleep(timing.current.last_try / 30)
            self.connection.breaker.worked()  # its pauses may outlast the worker
            self._forget_all()
        self.connection.close()

    def _start_text(self, delivery: Delivery) -> str:
        """Return a start as it is stored: its time and its worker."""
        if not self._worker:
            self._worker = f"{delivery.worker_pid or 0}@{delivery.worker_hostname}#{self._token}"
            if delivery.release is not None:
                release = quote(delivery.release, safe="", errors="backslashreplace")
                self._worker += f":{release}"
        return f"{to_micros(delivery.started_at)}|{self._worker}"

    def _read_fields(self, key: MessageKey) -> dict[bytes, bytes]:
        reply = self.connection.send_and_wait("HGETALL", self._keys.run(key))
        return dict(zip(reply[::2], reply[1::2], strict=True))

    def _ended_command(
        self, key: MessageKey, place: str, number: int, end: str, kind: int, start: str
    ) -> Command:
        retried = 0 if kind != _RETRIED else int(RETRIED_KEPT_SECONDS * 1000)
        keys = [self._keys.run(key), self._keys.late_copies(key.dead_letter_queue)]
        args = (place, number, end, self._ttl, kind, start, key.letter_id, retried)
        return self._ended.command(keys, *args)

    def _forget_all(self) -> None:
        """Send the clean-ups, until none is left or Redis fails."""
        while self._done and self._clean_up():
            pass

    def _clean_up(self) -> bool:
        """Delete the counts of messages that are done, many with one command."""
        done, commands = self._take_done()
        sent = self.connection.send_unanswered(commands, commands)
        if not sent:  # a copy that comes meanwhile must not be taken for one that never ended
            self._done.extendleft(reversed(done))
        return sent

    def _take_done(self) -> tuple[list[_Done], list[Command]]:
        """Take the next messages that are done, and the commands that delete their counts."""
        with self._lock:
            count = min(len(self._done), self._MOST_AT_ONCE)
            done = [self._done.popleft() for _ in range(count)]
        queues: dict[str, list[_Done]] = {}  # in a cluster, each is on a slot of its own
        for one in done:
            queues.setdefault(one[0].dead_letter_queue, []).append(one)
        return done, [self._forgotten(some) for some in queues.values()]

    def _forgotten(self, done: list[_Done]) -> Command:
        """Return the command that deletes the counts of messages of one queue."""
        keys = [self._keys.run(key) for key, _, _ in done]
        args = [
            value
            for key, delivery, first in done
            for value in (key.place, self._start_text(delivery), int(first))
        ]
        return self._forget.command(keys, *args)


def _deliveries(fields: Mapping[bytes, bytes], key: MessageKey) -> tuple[Delivery, ...]:
    """Return the deliveries recorded in a run hash of a message and what led to it, oldest first.

    What led to it has the name of its publication. Where a plain publisher named none, it may be
    any message of fewer retries: of each number the newest that was retried, else the newest.
    """
    found: dict[int, tuple[tuple[bool, bool, float], list[Delivery]]] = {}
    for place, some in _by_place(fields).items():
        if not some or some[0].retries > key.retries:
            continue
        is_same = place.partition(".")[2] == key.publication
        last = some[-1]
        rank = (is_same, last.outcome is Outcome.RETRIED, last.started_at.timestamp())
        if is_same or some[0].retries < key.retries:
            found[some[0].retries] = max(
                found.get(some[0].retries, (rank, some)), (rank, some), key=itemgetter(0)
            )
    return tuple(sorted(chain.from_iterable(one for _, one in found.values()), key=_ORDER))


def _by_place(fields: Mapping[bytes, bytes]) -> dict[str, list[Delivery]]:
    """Return the deliveries in a run hash, of each message the oldest first."""
    found: dict[str, dict[int | str, Delivery]] = {}
    for name, value in fields.items():
        what, _, rest = name.decode().partition(":")
        place, _, number = rest.partition(":")
        deliveries = found.setdefault(place, {})
        if what == "aside":  # interrupted; its number was assigned again
            deliveries[rest] = Delivery.from_json(json.loads(value))
        elif what == "end":
            end = Delivery.from_json(json.loads(value))
            deliveries[int(number)] = replace(end, number=int(number))
        elif what == "start":
            retries = int(place.partition(".")[0])
            deliveries.setdefault(int(number), _started(retries, int(number), value.decode()))
    return {place: sorted(some.values(), key=_ORDER) for place, some in found.items()}


def _started(retries: int, number: int, value: str) -> Delivery:
    started, _, worker = value.partition("|")
    name, _, token = worker.rpartition("#")
    pid, _, hostname = name.partition("@")
    return Delivery(
        number=number,
        retries=retries,
        started_at=from_micros(int(started)),
        worker_hostname=hostname,
        worker_pid=int(pid) or None,
        release=unquote(token.partition(":")[2]) or None,
    )
