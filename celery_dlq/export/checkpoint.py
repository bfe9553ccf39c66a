"""The state of an export, kept in its folder: what the folder holds, and each queue's progress.

::

    _celery_dlq/about               the filter and the redaction of the folder; whose it is
    _celery_dlq/<queue>.json        the checkpoint and, while files are put in place, the intent
    _celery_dlq/drafts/             unfinished files; removed by the next export

The store has a copy of each checkpoint, which is written first. By the copies it knows what each
folder lacks: retention and ``--then-trim`` of another folder leave that. The copy is older than the
folder's, or missing, only if the store came back from a snapshot or is another one. The queue
then begins a new generation: it is read again from the position in the copy, and letters that are
in files of earlier generations are left out.

A folder that several machines reach has one export at a time, by a lease in their shared store.
An object store does not keep a second writer out, and a lease alone does not either: a process may
be paused for an hour between checking its lease and writing. So the store keeps the state of the
export, and writes it in one step with checking the lease:

- The range of letters is saved there before the first file is put in place. A process that lost
  its lease cannot save another range. Its files of the earlier range may still arrive late; the
  next owner first writes files of the same names with the same letters.
- The checkpoint is saved there before it is written to the folder. A checkpoint that arrives late
  in the folder is older than the store's, and the later of the two counts.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from celery_dlq import timing
from celery_dlq.errors import ExportError, StoreUnavailable
from celery_dlq.export import partition
from celery_dlq.export.destination import NOTES, Destination
from celery_dlq.letters.filters import LetterFilter
from celery_dlq.letters.printable import get_logger, readable
from celery_dlq.letters.record import from_micros, iso, to_micros
from celery_dlq.store.endless import repeat_until
from celery_dlq.store.records import FIRST_POSITION, ordered

if TYPE_CHECKING:
    from celery_dlq.store.lease import Lease, LeaseReply
    from celery_dlq.store.letters import Letters

logger = get_logger("celery_dlq.export")

_ABOUT = f"{NOTES}/about"
_STATE = (
    *("queue", "position", "intent", "since", "trimmed", "trimmed_letters", "trimming", "store"),
    *("generation", "compared"),
)


class ExportLeases:
    """The leases of one run of an export, kept until it ends."""

    def __init__(
        self,
        store: Letters,
        destination: Destination,
        store_id: str,
        about: Mapping[str, Any],
    ) -> None:
        self._store = store
        self._name = destination.name
        self.folder: str = about["folder"]
        self.place = destination.shared or self.folder
        self.is_local = destination.shared is None
        self._seconds = timing.current.export_lease if destination.shared else 0.0
        self.store_id = store_id
        self.refused = False
        # The stored state is ``owner|…``.
        self._owner = f"{_host_name()} pid {os.getpid()} {uuid4().hex[:8]}"
        name = self._name if destination.shared else local_name(destination.root)
        self._about = {**about, "name": name}
        self._held: dict[str, Lease] = {}
        self._ended = threading.Event()
        self._keeper = threading.Thread(
            target=self._keep_renewing, name="celery_dlq-leases", daemon=True
        )

    def acquire(self, queue: str) -> Mapping[str, Any] | None:
        """Acquire a queue's lease, waiting until a dead owner's expires; return the saved state."""
        lease = self._store.lease(queue, self.place, self._owner, self._seconds)
        first = reply = lease.acquire()
        until = time.monotonic() + self._seconds + 1
        while not reply.acquired:
            if reply.state != first.state or time.monotonic() > until:  # renewed
                raise self._taken_over_error(reply)
            time.sleep(timing.current.short_look)
            reply = lease.acquire()
        self._held[queue] = lease
        if self._keeper.ident is None:
            self._keeper.start()
        state = readable(
            f"the state of an export of {queue}", partial(json.loads, reply.state or "null")
        )
        return state if isinstance(state, dict) else None

    def save_checkpoint(self, queue: str, state: Mapping[str, Any]) -> None:
        """Save a checkpoint in the store, if the lease is still held."""
        reply = self._held[queue].save_state(json.dumps({**state, **self._about}))
        if not reply.acquired:
            raise self._taken_over_error(reply)

    def release(self) -> None:
        """Release the leases; never raises."""
        self._ended.set()
        if self._keeper.is_alive():
            self._keeper.join()
        for lease in self._held.values() if self._seconds else ():
            with suppress(StoreUnavailable):
                lease.release()

    def _keep_renewing(self) -> None:
        repeat_until(self._renew_all, self._ended.is_set, "The leases of an export are not renewed")

    def _renew_all(self) -> None:
        if not self._ended.wait(self._seconds / 3 or timing.current.export_note):
            for lease in list(self._held.values()):
                with suppress(StoreUnavailable):  # the next `note` finds out
                    lease.renew()

    def _taken_over_error(self, reply: LeaseReply) -> ExportError:
        self.refused = True
        return ExportError(
            f"another export is writing to {self._name} "
            f"({reply.state.partition('|')[0] or 'it has ended since'}); nothing is lost, run the "
            f"export again when that one has ended, or choose another folder"
        )


@dataclass(slots=True)
class Checkpoint:
    """The progress of one queue's export."""

    destination: Destination  # The folder that keeps the checkpoint
    queue: str  # The dead-letter queue
    leases: ExportLeases  # The store's copy, written first, so that other machines stay out
    position: str | None = None  # Letters up to this position are in the files, each once
    # Last position of the files that are being put in place; `None`: there are none
    intent: str | None = None
    since: int | None = None  # The filter's `since` of the intent, in microseconds since 1970
    trimmed: str | None = None  # Letters up to this position were removed from the queue
    trimmed_letters: int = 0  # Number of those that are in the files
    trimming: str | None = None  # Letters up to this position are being removed
    store: str | None = None  # The id of the store that gave the positions
    generation: int = 0  # How often the queue was begun again; a part of the names of files
    # Letters up to the second position are looked for in the files of earlier generations that
    # end after the first one
    compared: Sequence[str] | None = None

    @classmethod
    def taken(
        cls, destination: Destination, queue: str, leases: ExportLeases
    ) -> tuple[Checkpoint, Checkpoint | None]:
        """Acquire the queue's lease, and return the later checkpoint of store and folder."""
        stored = leases.acquire(queue)
        found, mine = cls.read(destination, queue, leases), leases.store_id
        fresh = cls(destination, queue, leases, store=mine)
        if found.store not in (None, mine):
            return found, fresh
        found.store = mine
        if stored is not None and stored.get("folder") == leases.folder:
            known = {name: stored[name] for name in _STATE[1:] if name in stored}
            copy = replace(fresh, **{**known, "store": mine})
            other = readable(f"the store's copy of the export of {queue}", copy.checked)
            if other is None:
                return found, fresh
            if other.sort_key() < found.sort_key():
                return found, other
            if not leases.is_local:
                return other, None
            found.trimming = other.trimming  # an export that was killed may have removed some
            # A local folder may be a copy, or restored: what it lacks is written to it again.
            return found, None if other.generation == found.generation else fresh
        return found, None if found.last_position is None else fresh

    @classmethod
    def read(cls, destination: Destination, queue: str, leases: ExportLeases) -> Checkpoint:
        """The checkpoint in the folder; a new one at the beginning if there is none."""
        state = _load_json(destination, _checkpoint_name(queue))
        if state is None:
            return cls(destination, queue, leases)
        try:
            known = {n: state[n] for n in _STATE[1:] if n in state or n in ("position", "intent")}
            found = cls(destination, queue, leases, **known).checked()
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as exc:
            raise _not_ours(destination, _checkpoint_name(queue), exc) from exc
        if state.get("queue") != queue:
            raise _not_ours(destination, _checkpoint_name(queue), ValueError(state.get("queue")))
        return found

    def checked(self) -> Checkpoint:
        """Itself, if its values are usable; else a ``TypeError`` or ``ValueError``."""
        ordered(f"{self.generation + 0}-{self.trimmed_letters + 0}")
        from_micros(self.since or 0)
        _first, _last = compared = self.compared or (None, None)
        for position in (self.position, self.intent, self.trimmed, self.trimming, *compared):
            if position is not None:
                ordered(position)
        return self

    @property
    def last_position(self) -> str | None:
        """Letters up to this position are in the files, or may be; ``None``: there are none."""
        return self.intent or self.position

    @property
    def comparing(self) -> bool:
        """True if letters after the position may be in files of earlier generations."""
        if self.compared is None:
            return False
        return ordered(self.position or FIRST_POSITION) < ordered(self.compared[1])

    def begin_again(self, known: Checkpoint | None, end: str | None) -> None:
        """Begin a new generation, in which no letter of the files is written again."""
        first = None if known is None or known.comparing else known.position
        until = max((self.last_position or FIRST_POSITION, end or FIRST_POSITION), key=ordered)
        self.generation += 1
        self.compared = (first or FIRST_POSITION, until)
        self.position = None if known is None else known.position
        self.trimmed = None if known is None else known.trimmed
        self.trimmed_letters = 0 if known is None else known.trimmed_letters
        self.store = self.leases.store_id
        self.intent = self.since = self.trimming = None
        self.save()

    def intend(self, last: str, since: datetime | None) -> None:
        """Save the last position of the files, before the first is put in place."""
        self.intent, self.since = last, None if since is None else to_micros(since)
        self.save()

    def commit(self) -> None:
        """Save that all files of the intent are in place."""
        self.position, self.intent, self.since = self.intent, None, None
        self.save()

    def pass_to(self, position: str) -> None:
        """Save that there was nothing to write up to a position."""
        self.position, self.intent = position, None
        self.save()

    def record_trim(self, position: str, letters: int) -> None:
        """Save that the letters up to a position, so many more, are removed from the queue."""
        self.trimmed = position
        self.trimmed_letters += letters
        if self.trimming is not None and ordered(self.trimming) <= ordered(position):
            self.trimming = None
        self.save()

    def sort_key(self) -> tuple[Any, ...]:
        """Sorts the states of one queue's export in their order."""
        places = (ordered(place or FIRST_POSITION) for place in (self.position, self.intent))
        return (self.generation, *places)

    def to_store_state(self) -> Mapping[str, Any]:
        """Write it down in the store: nobody removes letters that the folder lacks."""
        state = {name: getattr(self, name) for name in _STATE}
        self.leases.save_checkpoint(self.queue, state)
        return state

    def save(self) -> None:
        """Write it down in the store, then beside the files: the store is asked first."""
        state = self.to_store_state()
        self.destination.save(_checkpoint_name(self.queue), json.dumps(state).encode())


def local_name(root: str) -> str:
    """The name of a folder of this machine, which others also have."""
    return f"{root} on {_host_name()}"


def _host_name() -> str:
    return socket.gethostname().replace("|", "_")


def agree_on_folder(
    destination: Destination,
    where: LetterFilter,
    redacted: Mapping[str, Any],
    of: str | None = None,
    *,
    store: str | None = None,
    take_over: bool = False,
) -> str:
    """Save the filter and redaction of a new folder, or check that they are unchanged.

    A checkpoint means "all letters up to this position are exported". After a change of the
    filter, the letters that the first filter left out would be missing without a trace.
    """
    now: dict[str, Any] = {
        "where": replace(where, since=None, until=None).to_json(),
        "since": None if where.since is None else to_micros(where.since),
        "redacted": dict(redacted),
        **({"of": of} if of is not None else {}),
    }
    before = _load_json(destination, _ABOUT)
    now["id"] = (before or {}).get("id") or uuid4().hex
    theirs = (before or {}).get("store")
    now["store"] = store or theirs
    if before is not None:
        _check_same(destination, before, now)
    if theirs not in (None, now["store"]) and not take_over:
        raise ExportError(
            f"expected {destination.name} to be a folder of this store, got one of another store "
            f"(or of this Redis before it was emptied): nothing is exported; export to a new "
            f"folder, or let this store take it over with --take-over (take_over=True)"
        )
    if before is not None and theirs is None and store is not None:
        logger.warning("%s now belongs to this store", destination.name)
    if before != now:
        destination.save(_ABOUT, json.dumps(now).encode())
    return str(now["id"])


def _check_same(
    destination: Destination, before: Mapping[str, Any], now: Mapping[str, Any]
) -> None:
    for part, label in (("where", "filter"), ("redacted", "redaction")):
        if before.get(part) != now[part]:
            raise ExportError(
                f"expected the {label} of {destination.name} to be {_json(before.get(part))}, as "
                f"in its first export, got {_json(now[part])}; use the same, or export to a new "
                f"folder"
            )
    if before.get("of") != now.get("of"):
        holds, given = before.get("of") or "letters", now.get("of") or "letters"
        raise ExportError(
            f"expected {destination.name} to be a folder of {given}, got one of {holds}; "
            f"export to a new folder"
        )
    since, new = before.get("since"), now["since"]
    if since is not None and (new is None or new < since):
        got = "none" if new is None else iso(from_micros(new))
        raise ExportError(
            f"expected since to be {iso(from_micros(since))} or later, as in the last export to "
            f"{destination.name}, got {got}: older letters were left out there; "
            f"export to a new folder"
        )


def _json(part: Any) -> str:
    return json.dumps(part, ensure_ascii=False) if part else "none"


def _checkpoint_name(queue: str) -> str:
    return f"{NOTES}/{partition.note_name(queue)}"


def _load_json(destination: Destination, name: str) -> Any:
    text = destination.load(name)
    if text is None:
        return None
    try:
        state = json.loads(text)
        if not isinstance(state, dict):
            raise TypeError(type(state).__name__)  # noqa: TRY301 - reported as the others are
    except (ValueError, TypeError) as exc:
        raise _not_ours(destination, name, exc) from exc
    return state


def _not_ours(destination: Destination, name: str, exc: Exception) -> ExportError:
    return ExportError(
        f"{destination.name}/{name} is not a file of an export ({exc!r}); repair it, or export to "
        f"a new folder"
    )
