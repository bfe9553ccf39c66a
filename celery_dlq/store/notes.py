"""Notes on groups, their states and their owners, in Redis."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from urllib.parse import unquote

from celery_dlq.events import GroupState
from celery_dlq.letters.printable import readable
from celery_dlq.letters.record import Recorded, check_aware, from_micros, to_micros
from celery_dlq.store.keys import spelled, text_of
from celery_dlq.store.new_letters import release_text
from celery_dlq.store.part import Part
from celery_dlq.store.records import KEPT_DAYS, OPEN_GROUP, GroupStatus

MAX_NOTES = 50
"""Maximum number of notes on a group; the oldest one goes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Note(Recorded):
    """A note on a group.

    Attributes:
        at: When it was written, aware UTC.
        actor: Who wrote it.
        text: Its text.
    """

    at: datetime
    actor: str
    text: str

    def __post_init__(self) -> None:
        check_aware("at", self.at)


_NOT_OPEN = {one.value.encode(): one for one in GroupState if one is not GroupState.OPEN}
_KEPT_MILLIS = KEPT_DAYS * 24 * 3600 * 1000
_OWNER = "owner:"


class GroupNotes(Part):
    """Keeps the notes, the states and the owners of groups.

    What is overdue is removed when the next note or state is written in the queue.
    """

    def add_note(self, dead_letter_queue: str, fingerprint: str, note: Note) -> None:
        """Add a note to a group. Adding the same note again changes nothing."""
        text, queue = json.dumps(note.to_stored()), dead_letter_queue
        self._run_script("note", spelled(fingerprint), text, MAX_NOTES, _KEPT_MILLIS, queue=queue)

    def notes(self, dead_letter_queue: str, fingerprint: str) -> list[Note]:
        """Return the notes on a group, newest first."""
        text = self._client.hget(self._keys.notes(dead_letter_queue), spelled(fingerprint))
        reads = (partial(_parsed_note, line) for line in reversed((text or b"").splitlines()))
        found = (readable(f"a note on {fingerprint}", read) for read in reads)
        return [note for note in found if note is not None]

    def newest(self, dead_letter_queue: str, fingerprints: Sequence[str]) -> dict[str, Note]:
        """Return the newest note on each of many groups, by one command; those that are read."""
        names, found = [*map(spelled, fingerprints)], dict[str, Note]()
        texts = self._client.hmget(self._keys.notes(dead_letter_queue), names) if names else ()
        for fingerprint, text in zip(fingerprints, texts, strict=True):
            with suppress(ValueError, KeyError, TypeError, IndexError):
                found[fingerprint] = _parsed_note((text or b"").splitlines()[-1])
        return found

    def set_status(self, dead_letter_queue: str, fingerprint: str, status: GroupStatus) -> None:
        """Set the state of a group: open, muted or resolved.

        Storing a letter makes it regressed; see `Letters.dead_letter`.
        """
        args = (spelled(fingerprint), _state_text(status), _KEPT_MILLIS, "")
        self._run_script("group_state", *args, queue=dead_letter_queue)

    def status(self, dead_letter_queue: str, fingerprint: str) -> GroupStatus:
        """Return the state of a group; one whose mute has ended is open."""
        return self.statuses(dead_letter_queue, [fingerprint]).get(fingerprint, OPEN_GROUP)

    def statuses(
        self, dead_letter_queue: str, fingerprints: Sequence[str]
    ) -> dict[str, GroupStatus]:
        """Return the states of those groups that are not open or have an owner, by fingerprint."""
        key, names = self._keys.states(dead_letter_queue), [*map(spelled, fingerprints)]
        names += [f"{_OWNER}{name}" for name in names]
        texts = self._client.hmget(key, names) if names else ()
        if not any(texts):
            return {}
        now, found, half = self.now(), dict[str, GroupStatus](), len(fingerprints)
        for name, text, owner in zip(fingerprints, texts[:half], texts[half:], strict=True):
            status = OPEN_GROUP if text is None else _status_at(text, now)
            if owner is not None:
                status = replace(status, owner=text_of(owner))
            if status is not OPEN_GROUP:
                found[name] = status
        return found

    def set_owner(self, dead_letter_queue: str, fingerprint: str, owner: str) -> None:
        """Set who takes care of a group, whatever its state is or becomes; empty for nobody."""
        args = (spelled(fingerprint), owner, _KEPT_MILLIS, _OWNER)
        self._run_script("group_state", *args, queue=dead_letter_queue)

    def states(self, dead_letter_queue: str) -> dict[str, str]:
        """Return the states of all groups that are not open; what else is known is not read."""
        now, found = to_micros(self.now()) // 1000, {}
        for name, text in self._client.hgetall(self._keys.states(dead_letter_queue)).items():
            state, _, rest = text.partition(b"|")  # Of thousands, perhaps: little is decoded
            known, until = _NOT_OPEN.get(state), rest.partition(b"|")[0]
            over = known and known.is_quiet and until.isdigit() and int(until) <= now
            if known and not over and not name.startswith(_OWNER.encode()):
                found[text_of(name)] = known.value
        return found


def _state_text(status: GroupStatus) -> str:
    """Return a state as ``parts/state.lua`` reads it; an open one is empty."""
    if status.state is GroupState.OPEN:
        return ""
    if status.state.is_quiet:
        parts = ["" if status.until is None else str(to_micros(status.until) // 1000), "", ""]
    else:
        seen = ",".join(map(release_text, status.releases))
        at = "" if status.at is None else str(to_micros(status.at))
        parts = [release_text(status.release), seen, at]
    return "|".join([status.state.value, *parts, json.dumps(status.to_stored())])


def _parsed_note(line: bytes) -> Note:
    return Note.from_stored(json.loads(line))


def _status_at(text: bytes, now: datetime) -> GroupStatus:
    status = readable("the state of a group, which counts as open", partial(_parsed_status, text))
    if status is None or status.state is GroupState.OPEN:
        return OPEN_GROUP
    return OPEN_GROUP if status.until is not None and status.until <= now else status


def _parsed_status(text: bytes) -> GroupStatus:
    state, first, second, third, facts = text_of(text).split("|", 4)
    status = GroupStatus.from_stored(json.loads(facts))
    if state != GroupState.REGRESSED.value:
        return status
    return replace(
        status,
        state=GroupState.REGRESSED,
        regressed_at=from_micros(int(first)),
        regressed_in=unquote(second) or None,
        letter_id=third,
    )
