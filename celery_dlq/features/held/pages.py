"""Messages of a hold: look at each before anybody starts it, edit it, or stop it."""

from __future__ import annotations

from celery_dlq import timing
from celery_dlq.errors import BrokerUnavailable, DLQError, NotFound, StoreUnavailable
from celery_dlq.features.held.operations import HeldWindow
from celery_dlq.letters.filters import LetterFilter
from celery_dlq.letters.printable import printable_json
from celery_dlq.operations.edit import Edit, edits_of
from celery_dlq.operations.paging import LetterPage
from celery_dlq.operations.release import HeldMessages
from celery_dlq.web.http import Call, Page, Panel, Permission, get, post
from celery_dlq.web.pages import Row, confirm, json_text, suppressed
from celery_dlq.web.pages.changes import typed_json
from celery_dlq.web.pages.letters import arguments_of


def held_messages(call: Call) -> Page:
    """Show the messages of a hold, the newest first, or those with an argument."""
    hold_id, text = call.parts["hold"], call.typed("where")
    held = next((one for one in call.dlq.holds() if one.hold.id == hold_id), None)
    if held is None:
        raise NotFound(f"expected the id of a hold, got {hold_id!r}")
    page, error = LetterPage(), ""
    try:
        page = HeldWindow(call.dlq.assembly).page(
            hold_id,
            LetterFilter(conditions=(text,)) if text else None,
            call.value("cursor") or None,
            timing.current.page,
        )
    except StoreUnavailable:
        raise
    except DLQError as exc:  # what was typed
        error = str(exc)
    return call.page(
        "held.html",
        status=400 if error else 200,
        title=f"Held by {hold_id} ({held.held:,})",
        rows=[Row.of(call, entry) for entry in page.entries],
        page=page,
        text=text,
        error=error,
        held=held,
    )


def held_message(call: Call, error: str = "") -> Page:
    """Show one message with its arguments, which can be edited."""
    hold_id, letter_id = call.parts["hold"], call.parts["letter"]
    reading = HeldWindow(call.dlq.assembly).reading
    entry = reading.entry(letter_id, hold_id)[1]
    letter = call.masked(entry)
    arguments, why_none = arguments_of(letter)
    typed = suppressed(lambda: reading.arguments(letter_id, hold_id), DLQError)
    return call.page(
        "held_message.html",
        status=400 if error else 200,
        title=f"Held: {letter.task_name or 'no task'} {letter.id[:8]}",
        message=letter,
        seen=entry.position,
        arguments=arguments,
        why_none=why_none,
        edits=edits_of(letter.decoded("headers")),
        typed=[_shown(call, *pair) for pair in zip(("args", "kwargs"), typed or (), strict=False)],
        redacts=bool(call.dlq.redaction),
        error=error,
    )


def _shown(call: Call, name: str, value: object) -> tuple[str, str]:
    """A field of the form, and its JSON: as it is, or as it was typed and refused."""
    return name, printable_json(call.value(name)) or json_text(value)


def edit_held(call: Call) -> Page:
    """Edit a held message; it stays held."""
    hold_id, letter_id = call.parts["hold"], call.parts["letter"]
    try:
        change = Edit(
            args=typed_json(call, "args", list, "a list"),
            kwargs=typed_json(call, "kwargs", dict, "an object"),
        )
        note, seen = call.typed("note"), call.typed("seen")
        call.dlq.edit_held(hold_id, letter_id, change, note=note, seen=seen)
    except (StoreUnavailable, BrokerUnavailable, NotFound):
        raise
    except DLQError as exc:
        return held_message(call, str(exc))
    return call.to("held_message", hold=hold_id, letter=letter_id)


def discard_held(call: Call) -> Page:
    """Stop a held message for good: first show which, then do it."""
    hold_id, letter_id, note = call.parts["hold"], call.parts["letter"], call.typed("note")
    letter = call.masked(HeldWindow(call.dlq.assembly).reading.entry(letter_id, hold_id)[1])
    return confirm(
        call,
        lambda: call.dlq.discard_held(hold_id, letter_id, note=note),
        title="Discard this message for good?",
        button="Discard 1 message",
        facts={
            "task": letter.task_name or "no task",
            "message": letter_id,
            "held by": hold_id,
            "note": note or "-",
            "then": "no worker runs it, and nothing brings it back",
        },
        back=call.link("held_messages", hold=hold_id),
    )


def link(_call: Call, found: HeldMessages) -> Panel:
    """The link from the list of holds to the messages of one."""
    return "held_link.html", {"held": found}


ROUTES = (
    get("/holds/{hold}", held_messages),
    get("/holds/{hold}/{letter}", held_message),
    post("/holds/{hold}/{letter}/edit", edit_held, Permission.HOLD, "edit held messages"),
    post("/holds/{hold}/{letter}/discard", discard_held, Permission.HOLD, "discard held messages"),
)
