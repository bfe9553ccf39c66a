"""``celery -A app dlq`` alone: the cause, what sets it apart, what is in force, what comes next."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import redis
from builders import DLQ, a_letter, an_app, key_of
from click.testing import CliRunner, Result
from rich.text import Text

from celery_dlq import DeadLetters, LetterFilter
from celery_dlq.cli.commands import dlq as commands
from celery_dlq.cli.night import fitting
from celery_dlq.operations.incidents import hold_command
from celery_dlq.store.records import QueueSummary
from celery_dlq.store.worker_records import WorkerInfo

CAUSE, OTHER = "a1" * 8, "b2" * 8
QUIET = "mails-DLQ"


def stored(dlq: DeadLetters, letters: int, **values: Any) -> None:
    """Store letters that died now."""
    dice = Random(letters)  # noqa: S311 - the same every time
    for _ in range(letters):
        kwargs = {"order": dice.randrange(10**9), **values.get("kwargs", {})}
        kwargs.setdefault("tenant", f"tenant-{dice.randrange(20)}")
        letter = a_letter(
            dead_lettered_at=datetime.now(timezone.utc),
            kwargs_json=json.dumps(kwargs),
            body=json.dumps([[], kwargs, {}]).encode(),
            **{name: value for name, value in values.items() if name != "kwargs"},
        )
        dlq.store.dead_letter(letter, key_of(letter))


@pytest.fixture
def shop(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[DeadLetters]:
    """Two causes of one task, of which tenant nordic has one, and a queue where nothing happens.

    There is time to compare all letters, on a slow machine, too.
    """
    monkeypatch.setattr("celery_dlq.features.differences.operations.AT_ONCE_SECONDS", 5.0)
    app = an_app(
        broker_url=redis_url, dlq_queues={"*": {"max_deliveries": 3}}, dlq_redact=["**.card"]
    )
    app.task(charge, name="shop.charge", shared=False)
    made = DeadLetters(app)
    known = {"exception_type": "shop.NoCard", "exception_message": "the card was declined"}
    stored(made, 80, fingerprint=CAUSE, release="8.1", kwargs={"tenant": "nordic"}, **known)
    stored(made, 40, fingerprint=OTHER, release="8.0")
    yield made
    made.close()


def charge(order: int, tenant: str) -> None:
    """Nothing here runs it."""


@pytest.fixture
def run(shop: DeadLetters, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Run a command in this process, as ``celery -A shop dlq …``."""
    monkeypatch.setattr(sys, "argv", ["celery", "-A", "shop", "-b", "redis://:secret@h", "dlq"])
    context = SimpleNamespace(app=shop.app, no_color=True)

    def call(*arguments: str, columns: int = 120, **options: Any) -> Result:
        runner = CliRunner(env={"COLUMNS": str(columns)})
        return runner.invoke(commands, [*arguments], obj=context, **options)

    return call


def next_of(done: Result) -> list[str]:
    """The commands that are said to be next, without what is before them."""
    assert done.exit_code == 0, done.output
    before = "  celery -A shop dlq "
    return [
        line.removeprefix(before) for line in done.output.splitlines() if line.startswith(before)
    ]


def test_the_night_is_five_commands_each_printed_by_the_one_before(
    run: Callable[..., Result], shop: DeadLetters
) -> None:
    """The page, hold, release, redrive with a canary, resolve in the release that runs now."""
    info = WorkerInfo(
        hostname="celery@a",
        pid=1,
        version="0",
        started_at=datetime.now(timezone.utc),
        queues=("orders",),
        tasks=("shop.charge",),
        release="8.2",
    )
    shop.registry.register(info)
    page = run()
    for text in ("shop.charge", "the card was declined", "NoCard", "8.1", "kwargs.tenant=nordic"):
        assert text in page.output, page.output
    assert re.search(r"of 80 .*\n.* an? (minute|hour)", page.output), page.output
    assert "secret" not in page.output
    show, hold, redrive = next_of(page)
    assert (show.split()[0], redrive) == ("show", f"redrive --fingerprint {CAUSE[:8]} --canary 10")
    assert hold.startswith("hold --task shop.charge --where kwargs.tenant=nordic --reason")

    (release,) = next_of(run(*shlex.split(hold)))
    assert release in run().output
    released = run(*release.split())
    assert next_of(released) == [redrive]
    shop.registry.register(info)  # it sends no heartbeats
    *watch, resolve = next_of(
        run(*redrive.split(), "--canary-wait", "1s", "--max-failures", "10", "--yes")
    )
    assert watch[0].startswith("jobs status ")  # no worker runs them
    assert resolve == f"resolve {CAUSE[:8]} --release 8.2"
    done = run(*resolve.split(), "--note", "OPS-12")
    assert done.exit_code == 0, done.output
    assert shop.group(DLQ, CAUSE).status.release == "8.2"


def test_a_cause_has_an_owner(run: Callable[..., Result], shop: DeadLetters) -> None:
    """By command and Python; on the night page, in rows, records and the audit."""
    assert "Nobody takes care of" in run("assign", CAUSE[:8]).output
    mine = run("assign", CAUSE[:8], "--me")
    (owner,) = {shop.group(DLQ, CAUSE).status.owner}
    assert mine.output.startswith(f"{owner} takes care of {CAUSE} of {DLQ}.")
    shop.assign(DLQ, OTHER[:8], " ann\n")
    assert "ann" in run("groups", DLQ).output
    assert "ann" in run().output
    assert {one.status.owner for one in shop.groups(DLQ)} == {owner, "ann"}
    assert shop.incidents(limit=1)[0].to_json()["owner"] == owner
    found = json.loads(run("assign", CAUSE[:8], "bob", "--json").output)
    assert found == {"dead_letter_queue": DLQ, "fingerprint": CAUSE, "owner": "bob"}
    assert run("assign", CAUSE[:8], "--nobody").output.startswith("Nobody takes care of")
    audit = [(one.action.value, one.detail["owner"]) for one in shop.changes(limit=3)]
    assert audit == [("assigned", "nobody"), ("assigned", "bob"), ("assigned", "ann")]
    assert run("assign", CAUSE[:8], "bob", "--me").exit_code == 2
    assert run("assign", "ffffffff", "bob").exit_code != 0


def fields_of(client: redis.Redis, key: bytes) -> list[bytes]:
    """The fields of a hash that counts arrivals."""
    names = client.hkeys(key) if client.type(key) == b"hash" else []
    return [name for name in names if name[:1].isdigit() and name.endswith(b":failed")]


def test_queues_that_are_quiet_are_counted(
    run: Callable[..., Result], shop: DeadLetters, redis_url: str
) -> None:
    """They are not in the way."""
    stored(shop, 3, dead_letter_queue=QUIET)
    with redis.Redis.from_url(redis_url) as client:
        hours = [key for key in client.keys("*mails-DLQ*") if fields_of(client, key)]
        assert client.delete(*hours) == 1  # as if they had come long ago
    page = run().output
    assert "1 other queue is quiet" in page
    assert "a minute, growing" in page


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_the_page_fits_its_terminal(
    run: Callable[..., Result], shop: DeadLetters, columns: int
) -> None:
    """Commands to copy are never cut."""
    shop.hold("shop.charge", reason="a reason of some length that has to be folded somewhere")
    page = run(columns=columns)
    shown = [line for line in page.output.splitlines() if not line.startswith("  celery")]
    assert max(map(len, shown)) <= columns
    assert len(next_of(page)) == 3


def test_a_cause_and_a_queue_need_no_whole_name(
    run: Callable[..., Result], shop: DeadLetters
) -> None:
    """A fingerprint needs no queue, and ``orders`` means ``orders-DLQ``."""
    assert CAUSE in run("groups", "orders").output
    listed = run("list", "--fingerprint", CAUSE[:6], "--json").output
    assert {json.loads(line)["dead_letter_queue"] for line in listed.splitlines()} == {DLQ}
    assert run("differences", "--fingerprint", CAUSE[:6]).exit_code == 0
    assert run("note", CAUSE[:6], "OPS-12").exit_code == 0
    assert shop.notes(DLQ, CAUSE)[0].text == "OPS-12"
    assert "OPS-12" in run("note", CAUSE[:6]).output
    stored(shop, 1, dead_letter_queue=QUIET, fingerprint=CAUSE)
    several = run("note", CAUSE[:6], "which one?")
    assert several.exit_code == 1
    assert "orders-DLQ" in several.output
    assert QUIET in several.output
    assert run("note", CAUSE[:6], "this one", "--queue", "mails").exit_code == 0
    unknown = run("resolve", "ffff")
    assert (unknown.exit_code, "fingerprint of a cause" in unknown.output) == (1, True)
    for command in (["redrive", "--yes"], ["list"], ["differences"]):
        neither = run(*command, "--task", "shop.charge")
        assert (neither.exit_code, "expected QUEUE" in neither.output) == (2, True)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [("", ("canary", 10)), ("all", ("", None)), ("no", None), ("canary", ("canary", 10))],
)
def test_many_letters_are_asked_for_with_a_canary(
    run: Callable[..., Result],
    shop: DeadLetters,
    monkeypatch: pytest.MonkeyPatch,
    answer: str,
    expected: tuple[str, int | None] | None,
) -> None:
    """On a terminal; the canary is the default."""
    terminal = SimpleNamespace(stdin=SimpleNamespace(isatty=lambda: True))
    monkeypatch.setattr("celery_dlq.cli.context.sys", terminal)
    done = run(
        *("redrive", "orders", "--fingerprint", CAUSE, "--force", "--canary-wait", "0.5s"),
        *("--max-failures", "10"),
        input=f"{answer}\n",
    )
    assert "10 of them first" in done.output
    jobs = shop.jobs()
    if expected is None:
        assert (done.exit_code, jobs) == (1, [])
        return
    (job,) = jobs
    assert dict(job.options.get("canary", {})).get("letters") == expected[1]


def test_without_letters_the_page_says_what_to_do(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing guarded: the two lines; no worker: what makes letters."""
    monkeypatch.setattr("celery._state._on_app_finalizers", set())  # shared tasks of other tests

    def page(**conf: Any) -> str:
        app = an_app(broker_url=redis_url, **conf)
        context = SimpleNamespace(app=app, no_color=True)
        done = CliRunner(env={"COLUMNS": "100"}).invoke(commands, [], obj=context)
        DeadLetters.of(app).close()
        assert done.exit_code == 0, done.output
        return done.output

    assert 'app.conf.dlq_queues = {"*": {"max_deliveries": 5}}' in page()
    assert "No live worker has the plugin" in page(dlq_queues={"orders": {"max_deliveries": 3}})


def test_what_is_redacted_is_on_no_page(shop: DeadLetters, run: Callable[..., Result]) -> None:
    """The message of the newest letter may quote its arguments."""
    stored(
        shop,
        200,
        fingerprint="c3" * 8,
        kwargs={"card": "4111-1111"},
        exception_message="card 4111-1111 is unknown",
    )
    page = run().output
    assert "c3c3c3c3" in page
    assert "4111" not in page


def test_a_plan_knows_what_speaks_against_it(run: Callable[..., Result], shop: DeadLetters) -> None:
    """Workers of the release in which the letters died, a colleague's note, the last canary."""

    def live(hostname: str, release: str) -> None:
        now = datetime.now(timezone.utc)
        info = WorkerInfo(hostname=hostname, pid=1, version="0", started_at=now, release=release)
        shop.registry.register(info)

    live("celery@old", "8.1")
    live("celery@new", "8.2")
    shop.note(DLQ, CAUSE, "wait for OPS-12")
    shop.redrive(DLQ, fingerprint=CAUSE, limit=20, canary=5, canary_wait=0.1, force=True)
    shown = run("redrive", "orders", "--fingerprint", CAUSE, "--dry-run", columns=200).output
    assert "1 of 2 live workers run release 8.1" in shown
    assert "celery@old" in shown
    assert "celery@new" not in shown
    assert "wait for OPS-12" in shown
    assert "the last canary of a1a1a1a1 ended with 'not finished'" in shown.lower()
    plan = shop.plan("redrive", DLQ, LetterFilter(fingerprint=CAUSE))
    assert len(plan.preview["warnings"]) == 2
    found = run("redrive", "orders", "--fingerprint", OTHER, "--dry-run", "--json")
    line = json.loads(found.output)
    assert (line["warnings"], line["notes"]) == ([], [])


def test_watch_shows_the_page_again_and_again(
    run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until Ctrl-C."""
    pauses: list[float] = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr("celery_dlq.cli.night.time", SimpleNamespace(sleep=sleep))
    done = run("watch", "--every", "3s")
    assert (pauses, done.exit_code) == ([3.0, 3.0], 0)
    assert done.output.count("Dead-letter queues") == 2
    assert run("watch", "--every", "0s").exit_code == 2


@pytest.mark.parametrize("rows", [6, 12, 200])
def test_a_small_screen_keeps_what_is_next(run: Callable[..., Result], rows: int) -> None:
    """The lines above it go; a command that is wider than the screen takes two of them."""
    page = run(columns=60).output.rstrip("\n")
    shown = fitting(Text(page), 60, rows).plain
    assert shown.endswith(page[page.index("Next:") :])
    assert sum(max(1, -(-len(line) // 60)) for line in shown.splitlines()) <= rows + 1
    assert (shown == page) == (rows == 200)


def test_the_name_of_a_queue_does_not_take_the_place_of_its_causes(
    run: Callable[..., Result], shop: DeadLetters
) -> None:
    """Names may be 255 characters long; the queue's own row has all of it, to be copied."""
    name = f"{'q' * 180}-DLQ"
    stored(shop, 90, fingerprint="d4" * 8, dead_letter_queue=name)
    page = run(columns=110).output
    assert page.split("Causes", 1)[0].count("q") >= 180
    assert f" {'q' * 59}… " in page


def test_what_is_settled_comes_last(run: Callable[..., Result], shop: DeadLetters) -> None:
    """Its letters stay, but the next command is about a cause that nobody has mended."""
    assert CAUSE[:8] in next_of(run())[-1]
    shop.resolve(DLQ, CAUSE, release="8.2")
    assert [one.group.fingerprint for one in shop.incidents()] == [OTHER, CAUSE]
    assert next_of(run())[-1] == f"redrive --fingerprint {OTHER[:8]} --canary 10"


def test_busy_queues_that_are_not_shown_are_not_quiet(
    run: Callable[..., Result], shop: DeadLetters
) -> None:
    """Five are shown."""
    for place in range(6):
        stored(shop, 2, dead_letter_queue=f"q{place}-DLQ")
    page = run().output
    assert "2 more had letters in the last hour" in page
    assert "quiet" not in page


def test_what_is_printed_names_the_queue_where_it_must(
    run: Callable[..., Result], shop: DeadLetters
) -> None:
    """A cause in two queues; a queue and a task whose names look like options and patterns."""
    odd, cause = "-odd* 'q'-DLQ", "d4" * 8
    for queue in (odd, QUIET):
        stored(shop, 300, dead_letter_queue=queue, fingerprint=cause, task_name="-a*b [c]")
    page = run()
    command = next_of(page)[-1]
    assert cause[:8] in command
    planned = run("redrive", "--dry-run", *shlex.split(command)[1:])
    assert "Would redrive 300 letters" in planned.output, planned.output
    shop.note(odd, cause, "first")
    job = shop.redrive(odd, fingerprint=cause, limit=2, force=True).redrive_id
    steps = [one.command for one in shop.next_steps(job)]
    assert any("--queue" in one for one in steps), steps
    for step in steps:
        verb, *words = shlex.split(step)
        done = run(verb, *(("--dry-run",) if verb == "redrive" else ()), *words)
        assert done.exit_code == 0, (step, done.output)


def test_growing_steady_slowing_quiet() -> None:
    """Now is the last five minutes; usual is the rest of the hour."""

    def direction(*, before: int, now: int) -> str:
        minutes = [before] * 55 + [now] * 5
        known: dict[str, Any] = {"arrivals": {"failed": minutes}, "per_minute": float(now)}
        return QueueSummary(name=DLQ, letters=1, **known).direction

    assert direction(before=1, now=10) == "growing"
    assert direction(before=0, now=1) == "growing"
    assert direction(before=10, now=11) == "steady"
    assert direction(before=10, now=1) == "slowing"
    assert direction(before=10, now=0) == "quiet"


def test_a_script_gets_the_causes_as_json(shop: DeadLetters, run: Callable[..., Result]) -> None:
    """As records; of a command it is an option of its own."""
    found = [json.loads(line) for line in run("--json").output.splitlines()]
    assert [one["fingerprint"] for one in found] == [CAUSE, OTHER]
    assert found == [json.loads(json.dumps(one.to_json())) for one in shop.incidents()]
    refused = run("--json", "queues")
    assert refused.exit_code == 2
    assert "dlq queues --json" in refused.output


def test_the_record_of_an_incident_is_json(shop: DeadLetters) -> None:
    """For programs: who answers a page automatically."""
    first = shop.incidents(limit=1)[0]
    found = json.loads(json.dumps(first.to_json()))
    assert (found["fingerprint"], found["dead_letter_queue"]) == (CAUSE, DLQ)
    assert (found["conditions"], found["last_hour"]) == (["kwargs.tenant=nordic"], 80)
    assert timedelta(minutes=-1) < datetime.now(timezone.utc) - first.group.last_seen_at


def test_a_hold_is_of_its_cause_and_no_other(run: Callable[..., Result], shop: DeadLetters) -> None:
    """Of two causes of one task, what is next is for the one that burns, however small it is."""
    small, name = "c3" * 8, "shop.way*[1]"
    shop.app.task(charge, name=name, shared=False)
    for number in range(5):
        stored(shop, 6 + number, fingerprint=f"d{number}" * 8, task_name=f"shop.other{number}")
    stored(shop, 5, fingerprint=small, task_name=name)
    for fingerprint, where in ((CAUSE, "kwargs.tenant=borealis"), (OTHER, "kwargs.order=7")):
        shop.hold("shop.charge", conditions=[where], reason=f"cause {fingerprint[:8]}")
    ids = {one.hold.reason.split()[1]: one.hold.id for one in shop.holds()}
    assert next_of(run())[1] == f"release {ids[CAUSE[:8]]}"
    for digits, hold_id in ids.items():
        last = f"redrive --fingerprint {digits} --canary 10"
        assert next_of(run("release", hold_id)) == [last]
    shop.hold("shop.charge", conditions=["kwargs.tenant=borealis"], reason="four eyes")
    assert next_of(run())[1].startswith("hold --task shop.charge --where kwargs.tenant=nordic ")

    command = hold_command(name, (), small[:8])
    (release,) = next_of(run(*shlex.split(command)))
    held = next(one.hold for one in shop.holds() if one.hold.id == release.split()[1])
    assert held.covers(name, "orders")
    assert not held.covers("shop.wayward1", "orders")
    assert next_of(run(*release.split())) == [f"redrive --fingerprint {small[:8]} --canary 10"]
