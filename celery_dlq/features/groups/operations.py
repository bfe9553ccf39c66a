"""What operators say of groups of letters: notes on a cause, its owner, what is done about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from celery_dlq.errors import DLQError
from celery_dlq.events import Action, Change, GroupState, whoami
from celery_dlq.letters.fingerprint import SHOWN_DIGITS
from celery_dlq.letters.printable import one_line, shortened
from celery_dlq.letters.record import iso
from celery_dlq.operations.instructions import Audit
from celery_dlq.store.notes import Note
from celery_dlq.store.records import OPEN_GROUP, GroupStatus

if TYPE_CHECKING:
    from celery_dlq.assembly import Assembly

MAX_NOTE_CHARS = 2000
MAX_RELEASE_CHARS = 200
MAX_OWNER_CHARS = 200
_MAX_AUDIT_CHARS = 200
_MOST_CHANGES_READ = 2_000


class SetBy(NamedTuple):
    """How operators set a state of a group."""

    method: str  # Of `Notes` and of `DeadLetters`
    action: Action
    option: str = ""  # The argument of the method that the form of the page asks for


SET_BY: Mapping[str, SetBy] = {
    GroupState.RESOLVED: SetBy("resolve", Action.RESOLVED, "release"),
    GroupState.MUTED: SetBy("mute", Action.MUTED, "until"),
    GroupState.OPEN: SetBy("reopen", Action.REOPENED),
}
"""Each state that operators set; the page of a group has a form for it, in this order."""


class Notes:
    """Writes and reads notes, and sets the states of groups."""

    def __init__(self, assembly: Assembly) -> None:
        self._notes = assembly.backend.notes
        self._registry = assembly.backend.workers
        self._reading = assembly.reading()
        self._audit = Audit(assembly.backend.workers, assembly.events)

    def note(self, dead_letter_queue: str, fingerprint: str, text: str) -> Note:
        """Add a note to a group of letters, for example the ticket of its bug.

        A group keeps its newest 50 notes: while it has letters, and for 90 days after.
        """
        text = checked_note(text)
        fingerprint, _ = self._known_group(dead_letter_queue, fingerprint)
        detail = {"fingerprint": fingerprint, "text": shortened(text, _MAX_AUDIT_CHARS)}
        at = self._audit.record(Action.NOTED, dead_letter_queue, detail).at
        note = Note(at=at, actor=whoami(), text=text)
        self._notes.add_note(dead_letter_queue, fingerprint, note)
        return note

    def notes(self, dead_letter_queue: str, fingerprint: str) -> list[Note]:
        """The notes on a group of letters, newest first."""
        return self._known_group(dead_letter_queue, fingerprint)[1]

    def resolve(
        self,
        dead_letter_queue: str,
        fingerprint: str,
        *,
        release: str | None = None,
        note: str = "",
    ) -> GroupStatus:
        """Say that the cause of a group is mended; its letters stay.

        If a task dies of it again, the group becomes *regressed*: see `DeadLettered.regressed`.
        The state is kept as long as a note, also while the group has no letters.
        """
        release = (release or "").strip() or None
        if release is not None and len(release) > MAX_RELEASE_CHARS:
            raise DLQError(
                f"expected a release of at most {MAX_RELEASE_CHARS} characters, got {len(release)}"
            )
        return self._set(GroupState.RESOLVED, dead_letter_queue, fingerprint, note, release=release)

    def mute(
        self,
        dead_letter_queue: str,
        fingerprint: str,
        *,
        until: datetime | None = None,
        note: str = "",
    ) -> GroupStatus:
        """Stop reports of a group to Sentry; its letters are stored and counted all the same."""
        if until is not None and until.tzinfo is None:
            raise DLQError(f"expected until to have a time zone, got {until}")
        now = self._registry.now()
        if until is not None and until <= now:
            raise DLQError(f"expected until to be later than now, {iso(now)}, got {iso(until)}")
        return self._set(GroupState.MUTED, dead_letter_queue, fingerprint, note, until=until)

    def reopen(self, dead_letter_queue: str, fingerprint: str, *, note: str = "") -> GroupStatus:
        """Take back what `resolve` or `mute` said, or accept a regression as open."""
        return self._set(GroupState.OPEN, dead_letter_queue, fingerprint, note)

    def assign(self, dead_letter_queue: str, fingerprint: str, owner: str | None) -> Change:
        """Say who takes care of a group: ``None`` is nobody.

        The owner stays while the group is resolved, muted or reopened, and as long as a note, also
        while the group has no letters. Returns the entry of the audit.
        """
        name = one_line((owner or "").strip())
        if len(name) > MAX_OWNER_CHARS:
            raise DLQError(
                f"expected an owner of at most {MAX_OWNER_CHARS} characters, got {len(name)}"
            )
        fingerprint, _ = self._known_group(dead_letter_queue, fingerprint)
        detail = {"fingerprint": fingerprint, "owner": name or "nobody"}
        change = self._audit.record(Action.ASSIGNED, dead_letter_queue, detail)
        self._notes.set_owner(dead_letter_queue, fingerprint, name)
        return change

    def changes_of(self, dead_letter_queue: str, fingerprint: str, limit: int) -> list[Change]:
        """Who did what about a group, newest first: what the newest 2,000 changes say of it.

        Also holds whose reason names it, as those do that commands and pages propose.
        """
        digits = fingerprint[:SHOWN_DIGITS]
        found = self._registry.changes(limit=_MOST_CHANGES_READ, quoting=digits)
        of_group = (
            one
            for one in found
            if one.target == dead_letter_queue or one.action in (Action.HELD, Action.RELEASED)
        )
        return [*islice(of_group, limit)]

    def _set(
        self,
        state: GroupState,
        queue: str,
        fingerprint: str,
        note: str,
        *,
        release: str | None = None,
        until: datetime | None = None,
    ) -> GroupStatus:
        text = checked_note(note) if note.strip() else ""
        fingerprint, _ = self._known_group(queue, fingerprint)
        at, actor = self._registry.now(), whoami()
        status = OPEN_GROUP
        if state is not GroupState.OPEN:  # with what describes a group that has no letters any more
            group = self._reading.group(queue, fingerprint)
            status = GroupStatus(
                state=state,
                at=at,
                actor=actor,
                release=release,
                until=until,
                task_name=group.task_name,
                reason=group.reason,
                exception_type=group.exception_type,
                first_seen_at=group.first_seen_at,
                last_seen_at=group.last_seen_at,
                releases=tuple(group.releases),
            )
        shown = {"release": release, "until": iso(until), "text": shortened(text, _MAX_AUDIT_CHARS)}
        given = {name: value for name, value in shown.items() if value}
        self._audit.record(SET_BY[state].action, queue, {"fingerprint": fingerprint, **given})
        self._notes.set_status(queue, fingerprint, status)
        if text:
            self._notes.add_note(queue, fingerprint, Note(at=at, actor=actor, text=text))
        return replace(status, owner=self._notes.status(queue, fingerprint).owner)

    def _known_group(self, dead_letter_queue: str, fingerprint: str) -> tuple[str, list[Note]]:
        """The whole fingerprint and the notes; without any, check that the group exists."""
        fingerprint = self._reading.whole_fingerprint(dead_letter_queue, fingerprint)
        notes = self._notes.notes(dead_letter_queue, fingerprint)
        if not notes:
            self._reading.group(dead_letter_queue, fingerprint)
        return fingerprint, notes


def own_name() -> str:
    """The name under which one takes care of causes; of a user of the pages their own."""
    return whoami().partition(" via ")[0]


def checked_note(text: str) -> str:
    """Check the text of a note; return it without white space around it."""
    text = text.strip()
    if not 0 < len(text) <= MAX_NOTE_CHARS:
        raise DLQError(f"expected a note of 1 to {MAX_NOTE_CHARS:,} characters, got {len(text):,}")
    return text
