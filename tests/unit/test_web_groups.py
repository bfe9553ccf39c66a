"""The state of a group on the pages: shown as a word, found by it, and changed by a form."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Sequence
from datetime import datetime, timedelta, timezone
from html import unescape
from urllib.parse import urlencode

import intervals
import pytest
from builders import DLQ, NOW, a_letter, key_of
from web_pages import SAME_SITE, Pages, form_of, get, pages, post

from celery_dlq.events import GroupState
from celery_dlq.features.groups.operations import SET_BY
from celery_dlq.letters.packing import packed
from celery_dlq.letters.record import DeadLetter
from celery_dlq.store.records import Group
from celery_dlq.web.http import Permission, User

GROUP = "0123456789abcdef"
GROUPS = f"/queues/{DLQ}"
PAGE = f"{GROUPS}/groups/{GROUP}"


def stored(web: Pages, **changes: object) -> DeadLetter:
    """A letter of the group that is in the store."""
    letter = a_letter(**{"fingerprint": GROUP, "release": "2026.2", **changes})
    web.dlq.assembly.backend.letters.dead_letter(letter, key_of(letter))
    return letter


def shown(web: Pages, path: str, **query: str) -> str:
    """The text of a page."""
    response = web.handle(get(path, query=urlencode(query)))
    assert response.status == 200, response.body
    main = response.body.decode().partition("<main")[2]
    return re.sub(r"\s+", " ", unescape(re.sub(r"<[^>]+>", " ", main)))


def sent(web: Pages, fields: str) -> int:
    """Send the form for the state; return the status of the answer."""
    cookie, token = form_of()
    request = post(f"{PAGE}/state", cookie, token, fields=fields, headers=SAME_SITE)
    return web.handle(request).status


def state(web: Pages) -> GroupState:
    """The state of the group."""
    return web.dlq.assembly.backend.notes.status(DLQ, GROUP).state


def test_a_group_is_resolved_regresses_and_is_reopened_in_the_browser() -> None:
    """Each state is a word on its page and in the list, with who, when and in which release."""
    web = pages()
    letter = stored(web)
    assert "state open" in shown(web, PAGE)
    assert sent(web, "state=resolved&release=2026.3") == 303
    text = shown(web, PAGE)
    assert re.search(r"state resolved by olga via \S+, .*, in release 2026\.3", text)
    again = stored(web, release="2026.3")
    text = shown(web, PAGE)
    assert re.search(rf"died again .* in release 2026\.3: letter {again.id[:8]}", text)
    assert re.search(rf"{letter.exception_type} ?: .* regressed", shown(web, GROUPS))
    assert sent(web, "state=open") == 303
    assert "state open" in shown(web, PAGE)
    (change, *_) = web.dlq.assembly.backend.workers.changes(limit=5)
    assert (change.action, change.actor.split()[0]) == ("reopened", "olga")


def test_a_muted_group_is_not_hot() -> None:
    """It says until when it is muted; its letters are counted as before."""
    web = pages()
    stored(web)
    assert b'class="hot"' in web.handle(get(GROUPS)).body
    assert sent(web, "state=muted&for=2h") == 303
    assert b'class="hot"' not in web.handle(get(GROUPS)).body
    assert re.search(r"state muted by olga via \S+, .*, until ", shown(web, PAGE))
    assert sent(web, "state=muted&for=") == 303
    assert "until" not in shown(web, PAGE).partition("letters")[0]


def test_groups_are_found_by_state_also_without_letters() -> None:
    """A resolved group is usually empty; its page still tells what it was."""
    web = pages()
    letter = stored(web)
    stored(web, fingerprint="fedcba9876543210", task_name="shop.mail")
    assert sent(web, "state=resolved") == 303
    web.dlq.assembly.backend.letters.remove(DLQ, [letter.id])
    assert "shop.mail" in shown(web, GROUPS)
    resolved = shown(web, GROUPS, state="resolved")
    assert "; 1 cause is resolved" in resolved
    assert letter.task_name in resolved
    assert "shop.mail" not in resolved
    assert "shop.mail" in shown(web, GROUPS, state="open")
    assert f"{DLQ} has no muted cause." in shown(web, GROUPS, state="muted")
    assert "This cause has no letters now." in shown(web, PAGE)
    assert web.handle(get(GROUPS, query="state=fixed")).status == 400


def test_each_state_that_operators_set_has_a_form() -> None:
    """The forms follow the table of states; a group has none for opening it while it is open."""
    web = pages()
    stored(web)
    buttons = r'<button[^>]* name="state" value="(\w+)">(\w+)<'
    set_by = {each.value: way.method.capitalize() for each, way in SET_BY.items()}
    for at in GroupState.OPEN, GroupState.MUTED:
        expected = {name: verb for name, verb in set_by.items() if (name, at) != ("open", "open")}
        found = re.findall(buttons, web.handle(get(PAGE)).body.decode())
        assert dict(found) == expected
        assert sent(web, "state=muted") == 303
    for each, way in SET_BY.items():
        assert sent(web, f"state={each.value}") == 303
        (change, *_) = web.dlq.assembly.backend.workers.changes(limit=1)
        assert (state(web), change.action) == (each, way.action)


def assigned(web: Pages, fields: str, path: str = PAGE) -> int:
    """Send the form for the owner; return the status of the answer."""
    cookie, token = form_of()
    request = post(f"{path}/owner", cookie, token, fields=fields, headers=SAME_SITE)
    return web.handle(request).status


def test_a_cause_is_taken_by_one_click_and_keeps_its_owner_without_letters() -> None:
    """Me, somebody else, nobody; whatever its state becomes. The page says who did what."""
    web = pages()
    letter = stored(web)
    assert "owner nobody Me Somebody else" in shown(web, PAGE)
    assert assigned(web, "to=me") == 303
    assert "owner olga Nobody Somebody else" in shown(web, PAGE)
    assert " olga " in shown(web, GROUPS)
    assert assigned(web, "to=other&owner=ann") == 303
    assert sent(web, "state=resolved&release=2026.3&text=deployed") == 303
    stored(web, release="2026.3")
    web.dlq.redrive(DLQ, fingerprint=GROUP, force=True, note="SHOP-17")
    web.dlq.assembly.backend.letters.remove(DLQ, [letter.id])
    text = shown(web, PAGE)
    for words in ("no letters now", "state regressed", "owner ann Me Nobody", "deployed"):
        assert words in text
    history = text.partition("Who did what")[2]
    for words in ("assigned: olga", "assigned: ann", "resolved: 2026.3", "2 letters: SHOP-17"):
        assert words in history, history
    hold = web.dlq.hold(queue="orders", reason=f"cause {GROUP[:8]}").id
    web.dlq.end_hold(hold)
    history = shown(web, PAGE).partition("Who did what")[2]
    assert f" released: cause {GROUP[:8]} " in history, history  # and not when: that follows
    assert assigned(web, "to=nobody") == 303
    assert "owner nobody Me Somebody else" in shown(web, PAGE)
    assert [assigned(web, fields) for fields in ("", "to=other&owner=" + "x" * 201)] == [400, 400]
    assert assigned(web, "to=me", PAGE.replace(GROUP, "f" * 16)) == 404


def test_the_link_to_a_cause_is_whole_and_readable() -> None:
    """For a chat: as the browser writes it, or as `url` says; also without JavaScript."""
    web = pages()
    stored(web)
    assert f"link http://127.0.0.1:9809{PAGE} Copy" in shown(web, PAGE)
    web = pages(url="https://dlq.example/")
    stored(web)
    assert f'href="https://dlq.example{PAGE}"' in web.handle(get(PAGE)).body.decode()


@pytest.mark.parametrize(
    "fields",
    ["state=fixed", "", "state=muted&for=soon", "state=muted&for=9e99d", "state=muted&for=-2h"],
)
def test_what_cannot_be_set_is_a_page_that_says_so(fields: str) -> None:
    """And nothing is changed."""
    web = pages()
    stored(web)
    assert sent(web, fields) == 400
    assert state(web) is GroupState.OPEN


def test_who_may_only_look_sees_no_form_and_can_send_none() -> None:
    """Redriving is the permission for it, as for notes."""
    web = pages(access=lambda _: User(name="vera", permissions=frozenset({Permission.VIEW})))
    stored(web)
    assert "Resolve" not in shown(web, PAGE)
    assert sent(web, "state=resolved") == 403
    assert state(web) is GroupState.OPEN


def test_a_cause_that_was_mended_keeps_its_page_after_its_letters() -> None:
    """It can be resolved there once they are redriven; a wrong fingerprint is still a 404."""
    web = pages()
    letter = stored(web)
    web.dlq.assembly.backend.letters.remove(DLQ, [letter.id])
    text = shown(web, PAGE)
    for words in ("state open", letter.task_name, "no letters now", "All its letters are gone"):
        assert words in text
    assert sent(web, "state=resolved") == 303
    assert "state resolved" in shown(web, PAGE)
    assert web.handle(get(PAGE.replace(GROUP, "ffffffffffffffff"))).status == 404


def test_causes_beyond_the_first_page_are_found_by_page_and_by_name() -> None:
    """A hundred are shown; the others were nowhere."""
    web = pages()
    for number in range(130):
        stored(web, fingerprint=f"{number:016x}", task_name=f"shop.task{number:03d}")
    first, second = shown(web, GROUPS, by="letters"), shown(web, GROUPS, by="letters", page="2")
    found = [{*re.findall(r"shop\.task\d+", text)} for text in (first, second)]
    assert [*map(len, found)] == [100, 30]
    assert len(found[0] | found[1]) == 130
    assert "100 causes on this page" in first
    assert "Page 2 →" in first
    assert "← Page 1" in second
    for text in ("TASK017", f"{17:016x}"):
        named = shown(web, GROUPS, q=text)
        assert {*re.findall(r"shop\.task\d+", named)} == {"shop.task017"}
        assert "Redrive all" not in named, "it would be of more than what is seen"
    assert "No cause has “nobody” in its names" in shown(web, GROUPS, q="nobody")
    assert "There are not so many pages" in shown(web, GROUPS, page="3")
    assert web.handle(get(GROUPS, query="page=0")).status == 400


def test_a_search_of_causes_ends_in_time_and_says_how_far_it_came(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Twenty thousand causes took a second; names are found however they are spelled."""
    web = pages()
    for number, name in enumerate(("shop.charge", 'shop."ship"', "shop.größe", "shop.mail")):
        stored(web, fingerprint=f"{number:016x}", task_name=name, release=f"2026.{number}+a b")
    resolved = f"{PAGE.replace(GROUP, f'{0:016x}')}/state"
    cookie, token = form_of()
    fields = "state=resolved&release=2026.0"
    assert web.handle(post(resolved, cookie, token, fields=fields, headers=SAME_SITE)).status == 303
    for text, task in (
        ("CHARGE", "shop.charge"),
        ('"ship', 'shop."ship"'),
        ("GRÖSSE", "shop.größe"),
        ("2026.3+A B", "shop.mail"),
    ):
        found = shown(web, GROUPS, q=text)
        assert "1 cause on this page, the newest first, of the first 4" in found, text
        assert task in found, text
    assert "shop.charge" in shown(web, GROUPS, q="shop", state="resolved")
    assert "of the first 3" in shown(web, GROUPS, q="shop", state="open")
    intervals.change(monkeypatch, page=0.0)
    assert "in its names, of the newest 0." in shown(web, GROUPS, q="charge")


def test_the_row_of_a_cause_has_its_largest_tenant_and_its_last_note(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A value that most of its letters have and others have less often; masked as everywhere."""
    monkeypatch.setattr("celery_dlq.features.differences.shares.SECONDS", 10)
    web, masked = pages(), pages()
    masked.dlq.assembly.app.conf.dlq_redact = ["kwargs.card"]
    for number, one in itertools.product(range(10), (web, masked)):
        tenant = "nordic" if number < 8 else "acme"
        kwargs = {"tenant": tenant, "order": number, "region": "eu", "card": "4111"}
        stored(one, id=f"a{number}", kwargs_json=json.dumps(kwargs))
        other = {**kwargs, "tenant": f"t{number}", "card": number}
        stored(one, id=f"b{number}", kwargs_json=json.dumps(other), fingerprint="f" * 16)
    assert "10 of 10 have kwargs.card = 4111" in shown(web, GROUPS)
    web.dlq.note(DLQ, GROUP, "the gateway of nordic")
    web.dlq.note(DLQ, GROUP, "OPS-12")
    text = shown(web, GROUPS)
    assert "“OPS-12”" in text
    assert "the gateway of nordic" not in text
    text = shown(masked, GROUPS)
    assert "8 of 10 have kwargs.tenant = nordic" in text
    assert text.count("kwargs.tenant") == 1
    assert "4111" not in text


def test_red_is_only_what_grows() -> None:
    """As much an hour as all day long is the usual; what has no letters any more is mended."""
    steady = [10] * 24
    times = {"first_seen_at": NOW, "last_seen_at": NOW, "exception_type": None}
    one = {"fingerprint": GROUP, "task_name": "", "reason": "", "example_id": "", **times}
    for letters, course, last_hour, grows in (
        (9, steady, 12, False),
        (9, steady, 16, True),
        (9, [0] * 23 + [1], 1, True),
        (9, steady, 0, False),
        (0, steady, 16, False),
    ):
        group = Group(letters=letters, course=course, last_hour=last_hour, **one)
        assert group.is_growing is grows


def test_bars_have_a_line_where_each_release_began() -> None:
    """By the first letters of the queue, whatever their cause; the first release began before."""
    web, now = pages(), datetime.now(timezone.utc)
    store = web.dlq.assembly.backend
    for minutes, release in ((47, "7.1"), (29, "7.2"), (12, "7.2"), (6, "7.1")):
        letter = a_letter(id=f"{minutes}", release=release, fingerprint="f" * 16)
        place = f"{int(now.timestamp() - 60 * minutes) * 1000}-0"
        store.client.xadd(store.keys.letters(DLQ), packed(letter.to_fields()), id=place)
    stored(web, release="7.3", dead_lettered_at=now - timedelta(minutes=50))
    body = web.handle(get(PAGE)).body.decode()
    lines = re.findall(r'<line class="release" x1="(\d+)"[^>]*><title>([\d.]+)<', body)
    assert [release for _place, release in lines] == ["7.2", "7.3"]
    spans = [int(now.timestamp() - 60 * minutes) // 300 for minutes in (29, 0)]
    last = int(now.timestamp()) // 300
    assert [int(place) for place, _ in lines] == [6 * (11 - last + span) + 3 for span in spans]
    text = shown(web, PAGE)
    assert re.search(r"release 7\.2 since about \d\d:\d\d UTC", text)
    assert "release 7.1 since" not in text


def test_own_frames_stand_out_and_those_of_libraries_are_folded() -> None:
    """In their order, the innermost first."""
    web = pages()
    frames = [("/srv/shop/tasks.py", 4, "charge"), ("/usr/lib/python3.12/smtplib.py", 9, "send")]
    lines = [
        f'  File "{file}", line {line}, in {name}\n    {name}()' for file, line, name in frames
    ]
    stored(web, traceback="\n".join(["Traceback (most recent call last):", *lines, "OSError: no"]))
    body = web.handle(get(PAGE)).body.decode()
    own, _, folded = body.partition("1 frame in libraries</summary>")
    assert re.search(r'class="frame own"><div class="where">/srv/shop/tasks.py:4', own)
    assert "smtplib" not in own.partition("Newest example")[2]
    assert "smtplib.py:9" in folded.partition("</details>")[0]


def test_a_letter_leads_to_the_next_ones_of_its_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also from the newest example on the page of the cause."""
    web = pages()
    ids = [stored(web, id=f"same-{number}").id for number in range(3)]
    stored(web, id="other", fingerprint="f" * 16)
    links = re.compile(r'href="/queues/[^"]*/letters/([^"]*)">(?:← newer letter|older letter →)')
    for path, found in (
        (PAGE, [ids[1]]),
        (f"/queues/{DLQ}/letters/{ids[1]}", [ids[2], ids[0]]),
        (f"/queues/{DLQ}/letters/{ids[0]}", [ids[1]]),
        (f"/queues/{DLQ}/letters/other", []),
    ):
        assert links.findall(web.handle(get(path)).body.decode()) == found, path
    assert "no newer one · older letter →" in shown(web, PAGE)
    assert "no newer one · no older one" in shown(web, f"/queues/{DLQ}/letters/other")
    monkeypatch.setattr("celery_dlq.features.search.neighbours.MOST", 0)
    assert "look for older ones" in shown(web, f"/queues/{DLQ}/letters/{ids[1]}")
    assert "no newer one" not in shown(web, f"/queues/{DLQ}/letters/{ids[1]}")


@pytest.mark.parametrize(("conditions", "same"), [((), True), (("kwargs.tenant=acme",), False)])
def test_a_cause_whose_messages_are_held_offers_no_second_hold(
    conditions: Sequence[str], same: bool
) -> None:
    """Its page names the hold; a hold of others changes nothing."""
    web = pages()
    letter = stored(web)

    def charge(tenant: str) -> None:
        """Nobody runs it."""

    web.dlq.app.task(charge, name=letter.task_name, shared=False)
    hold = web.dlq.hold(letter.task_name, conditions=conditions)
    text = shown(web, PAGE)
    assert (f"Its messages are held by {hold.id}" in text) is same
    assert (f"Hold {letter.task_name} …" in text) is not same
