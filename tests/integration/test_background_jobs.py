"""Plans, and the jobs that a runner runs, on every store: started once, finished by somebody."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import intervals
import pytest
from builders import DLQ, a_letter, a_request, an_app, key_of
from fork_server import run_forked
from fresh import fresh_store, jobs_on
from servers import RedisServer
from slow_proxy import SlowProxy
from waiting import poll
from web_pages import Pages, get

from celery_dlq import DeadLetters, DLQError, LetterFilter, timing
from celery_dlq.errors import NotFound
from celery_dlq.events import Redriven, acting_as
from celery_dlq.operations import api
from celery_dlq.operations.edit import Edit
from celery_dlq.operations.job import CancelledError
from celery_dlq.operations.jobs import MOST_PLANS, Runner
from celery_dlq.operations.redrive import checks as checks_module
from celery_dlq.operations.redrive.message import RedriveOptions
from celery_dlq.operations.removal import DiscardOptions
from celery_dlq.store.letters import Letters

Operators = Callable[[], DeadLetters]
STORES = ["redis", "elsewhere"]


@pytest.fixture(params=STORES)
def operators(request: pytest.FixtureRequest) -> Iterator[Operators]:
    """Make an operator's `DeadLetters`; all share one store, each has its own connections."""
    url = request.getfixturevalue("redis_url")
    values: dict[str, Any] = {"dlq_url": url}
    if request.param == "redis":
        values["broker_url"] = url
    made: list[DeadLetters] = []

    def make() -> DeadLetters:
        app = an_app(**values)
        app.conf.task_default_queue = "orders"
        dlq = DeadLetters(app)
        made.append(dlq)
        return dlq

    yield make
    for dlq in made:
        dlq.close()


@pytest.fixture
def runners() -> Iterator[Callable[[DeadLetters], Runner]]:
    """Start runners; they are closed at the end."""
    started: list[Runner] = []

    def start(dlq: DeadLetters) -> Runner:
        started.append(dlq.runner().start())
        return started[-1]

    yield start
    assert all(runner.close() for runner in started)


def put(dlq: DeadLetters, count: int = 1, **changes: Any) -> list[str]:
    """Store letters of tasks; return their ids."""
    ids = []
    for _ in range(count):
        letter = a_letter(properties='{"priority": 0}', **changes)
        headers = a_request(id=letter.task_id, root_id=letter.task_id)
        letter = replace(letter, headers=json.dumps(headers))
        dlq.store.dead_letter(letter, key_of(letter))
        ids.append(letter.id)
    return ids


def left(dlq: DeadLetters) -> set[str]:
    """The ids of the letters that are still there."""
    return {letter.id for letter in dlq.letters(DLQ)}


def went(dlq: DeadLetters) -> list[str]:
    """A list of the letters that this process redrives from now on."""
    gone: list[str] = []

    def note(event: object) -> None:
        if isinstance(event, Redriven):
            gone.append(event.letter.id)

    dlq.events.subscribe(note)
    return gone


def planned(dlq: DeadLetters, **changes: Any) -> str:
    """A plan of a redrive, changed in the store; its id."""
    job = dlq.plan("redrive", DLQ)
    dlq.job_store.write(job.id, replace(job, **changes).to_stored())
    return job.id


def ended(dlq: DeadLetters, job_id: str, state: str = "done") -> Any:
    """The job, once it has this state."""
    return poll(lambda: (job := dlq.job(job_id)).state == state and job, timeout_seconds=30)


# -- plans ------------------------------------------------------------------------------


def test_a_plan_shows_what_would_happen_and_changes_nothing(operators: Operators) -> None:
    """Numbers, targets and examples; it is kept for all operators, for 15 minutes."""
    dlq = operators()
    ids = put(dlq, 12)
    plan = dlq.plan("redrive", DLQ, rate=5, canary=2)
    shown = operators().job(plan.id)
    assert shown == plan
    assert (shown.state, shown.total, shown.run) == ("planned", 12, 0)
    assert shown.expires_at == shown.updated_at + timedelta(minutes=15)
    preview = shown.preview
    assert (preview["letters"], preview["exact"]) == (12, True)
    assert [each["name"] for each in preview["queues"]] == ["orders"]
    assert preview["examples"] == ids[:10]
    assert sum(group["letters"] for group in preview["groups"]) == 12
    assert left(dlq) == set(ids)
    with pytest.raises(DLQError, match="which is planned"):
        dlq.resume(plan.id)


def test_a_plan_of_too_many_letters_says_at_least(operators: Operators) -> None:
    """The dry run ends in time; the operation would work on all of them."""
    dlq = operators()
    put(dlq, 3)
    plan = dlq.plan("discard", DLQ, LetterFilter(task_name="none"), forever=True, seconds=0)
    assert (plan.preview["exact"], plan.preview["letters"], plan.total) == (False, 0, None)
    assert dlq.plan("purge", DLQ, seconds=0).total == 3


def test_a_plan_runs_on_what_was_there_and_says_what_had_gone(
    operators: Operators, runners: Callable[[DeadLetters], Runner]
) -> None:
    """A letter that arrives later stays; one that went is missed in the note, not an error."""
    dlq = operators()
    first, *others = put(dlq, 5)
    plan = dlq.plan("redrive", DLQ)
    late = put(dlq)
    dlq.purge(DLQ, ids=frozenset({first}))
    gone = went(dlq)
    dlq.start(plan.id)
    runners(dlq)
    job = ended(dlq, plan.id)
    assert sorted(gone) == sorted(others)
    assert left(dlq) == set(late)
    assert job.note == "1 of the 5 planned letters had gone"


def test_an_expired_plan_cannot_be_started(operators: Operators) -> None:
    """The letters may be others by now."""
    dlq = operators()
    put(dlq)
    now = dlq.job_store.now()
    job_id = planned(dlq, expires_at=now - timedelta(seconds=1))
    assert dlq.job(job_id).state == "expired"
    with pytest.raises(DLQError, match="plan of the last 15 minutes"):
        dlq.start(job_id)
    with pytest.raises(DLQError, match="which is expired"):
        dlq.resume_in_background(job_id)
    assert len(left(dlq)) == 1


def test_plans_do_not_push_out_jobs(operators: Operators) -> None:
    """Those that expired long ago go first, then the oldest; whoever comes late is told."""
    dlq = operators()
    put(dlq)
    done = dlq.purge(DLQ).job_id
    put(dlq)
    old = planned(dlq, expires_at=dlq.job_store.now() - timedelta(hours=2))
    plans = [dlq.plan("redrive", DLQ).id for _ in range(MOST_PLANS + 2)]
    with pytest.raises(NotFound):
        dlq.job(old)
    kept = {job.id for job in dlq.jobs()}
    assert {done, plans[-1]} < kept
    assert len(kept.intersection(plans)) == len(kept) - 1 == MOST_PLANS


def test_messages_that_would_be_lost_need_force(operators: Operators) -> None:
    """The plan says which queue is missing; it cannot be started as it is."""
    dlq = operators()
    put(dlq)
    plan = dlq.plan("redrive", DLQ, to_queue="typo")
    if plan.preview["queues"][0]["found"] is not False:
        pytest.skip("this broker makes any queue")
    with pytest.raises(DLQError, match="typo"):
        dlq.start(plan.id)
    forced = dlq.plan("redrive", DLQ, to_queue="typo", force=True)
    assert forced.options["force"] is True
    assert dlq.start(forced.id).state == "waiting"
    started = dlq.start(plan.id, force=True)
    assert (started.state, started.options["force"]) == ("waiting", True)
    with pytest.raises(DLQError, match=r"a plan of a redrive to force, got .* a discard"):
        dlq.start(dlq.plan("discard", DLQ).id, force=True)


def test_unusable_plans_are_refused(operators: Operators) -> None:
    """In one sentence, before anything is kept."""
    dlq = operators()
    put(dlq)
    for kind, options, text in (
        ("burn", {}, "expected a kind of job"),
        ("redrive", {"rate": 0}, "rate to be more than 0"),
        ("redrive", {"canary": 0}, "canary to be 1"),
        ("redrive", {"to_queue": DLQ}, "got the dead-letter queue"),
        ("purge", {"limit": 0}, "limit to be 1 or more"),
        ("edit", {}, "the id of one letter"),
    ):
        with pytest.raises(DLQError, match=text):
            dlq.plan(kind, DLQ, **options)
    with pytest.raises(NotFound):
        dlq.plan("redrive", "x-DLQ")
    with pytest.raises(NotFound):
        dlq.start("x")
    assert dlq.jobs() == []


# -- a plan is a set of letters ----------------------------------------------------------


def ran(dlq: DeadLetters, job_id: str) -> Any:
    """A plan that was started, once this process has run it."""
    dlq.start(job_id)
    job = dlq.assembly.jobs().run_next(lambda: False)
    assert job is not None
    assert (job.id, job.state) == (job_id, "done")
    return job


KINDS = ["redrive", "discard", "purge"]


@pytest.mark.parametrize("kind", KINDS)
def test_two_plans_of_the_same_letters_work_on_them_once(operators: Operators, kind: str) -> None:
    """Both show the same ten; whoever comes second finds none of them and takes no others."""
    dlq = operators()
    ids = put(dlq, 15)
    plans = [dlq.plan(kind, DLQ, limit=10) for _ in range(2)]
    assert [plan.preview["examples"] for plan in plans] == [ids[:10]] * 2
    first, second = (ran(dlq, plan.id) for plan in plans)
    assert (first.handled, second.handled) == (10, 0)
    assert second.note == "10 of the 10 planned letters had gone"
    assert left(dlq) == set(ids[10:])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("where", [{}, {"task_name": "shop.charge"}])
def test_a_plan_with_a_limit_only_shrinks(
    operators: Operators, kind: str, where: dict[str, Any]
) -> None:
    """Half of its letters went, others came: it takes the other half."""
    dlq = operators()
    ids = put(dlq, 15)
    plan = dlq.plan(kind, DLQ, LetterFilter(**where), limit=10)
    dlq.purge(DLQ, ids=frozenset(ids[:5]))
    late = put(dlq, 5)
    assert ran(dlq, plan.id).handled == 5
    assert left(dlq) == {*ids[10:], *late}


def test_a_plan_of_chosen_letters_has_those_that_were_shown(operators: Operators) -> None:
    """Not one that came back since, nor, with a limit, those that were left out."""
    dlq = operators()
    ids = put(dlq, 4)
    dlq.discard(DLQ, ids=frozenset(ids[:1]))
    where = LetterFilter(ids=frozenset(ids))
    every, two = dlq.plan("purge", DLQ, where), dlq.plan("purge", DLQ, where, limit=2)
    assert (every.total, two.total) == (3, 2)
    dlq.restore(ids[0])
    shown = set(two.preview["examples"])
    assert ran(dlq, two.id).counts["removed"] == 2
    assert left(dlq) == set(ids) - shown
    assert ran(dlq, every.id).counts["removed"] == 1
    assert left(dlq) == {ids[0]}
    dlq.discard(DLQ)
    nothing = dlq.plan("purge", DLQ, where)
    dlq.restore(ids[0])
    assert (nothing.total, ran(dlq, nothing.id).handled) == (0, 0)
    assert left(dlq) == {ids[0]}


@pytest.mark.parametrize("options", [{}, {"limit": 2}])
def test_a_plan_of_an_empty_queue_stays_empty(
    operators: Operators, options: dict[str, Any]
) -> None:
    """Letters arrive before it is started."""
    dlq = operators()
    put(dlq)
    dlq.purge(DLQ)
    plan = dlq.plan("purge", DLQ, **options)
    late = put(dlq, 3)
    assert ran(dlq, plan.id).handled == 0
    assert left(dlq) == set(late)


def test_a_plan_with_a_limit_has_what_was_read_in_time(
    operators: Operators, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says so; a plan that found none is refused, because nobody would know what it does."""
    dlq = operators()
    ids = put(dlq, 6)
    with pytest.raises(DLQError, match="found none in 0 s; narrow the filter or leave out limit"):
        dlq.plan("purge", DLQ, LetterFilter(task_name="none"), limit=5, seconds=0)
    ticks = iter(range(100))
    monkeypatch.setattr(checks_module, "time", SimpleNamespace(monotonic=lambda: next(ticks)))
    plan = dlq.plan("purge", DLQ, limit=5, seconds=3.5)
    assert plan.total in {2, 3}  # some stores read page by page
    assert (plan.preview["letters"], plan.preview["exact"]) == (plan.total, True)
    assert plan.note == f"the time for the plan ended at {plan.total} letters of at most 5"
    assert ran(dlq, plan.id).counts["removed"] == plan.total
    assert left(dlq) == set(ids[plan.total :])


def test_the_plan_of_an_edit_names_the_holds_of_the_edited_message(operators: Operators) -> None:
    """An edit may lead a message out of a hold, or into it."""
    dlq = operators()
    (letter,) = put(
        dlq, body=b'[[], {"tenant": 1}, {}]', args_json="[]", kwargs_json='{"tenant": 1}'
    )
    holds = [
        dlq.hold(queue="orders", conditions=[f"kwargs.tenant={tenant}"]).id for tenant in (1, 2)
    ]
    waits = []
    for change in (Edit(assign={"headers.x": 1}), Edit(assign={"kwargs.tenant": 2})):
        plan = dlq.plan("edit", DLQ, LetterFilter(ids=frozenset({letter})), change=change)
        waits.append([what for what in plan.preview["waits_for"] if what.startswith("hold-")])
    assert [len(found) for found in waits] == [1, 1]
    assert [found[0].partition(" ")[0] for found in waits] == holds


DIES = """
import os, signal, sys
from builders import an_app
from celery_dlq import DeadLetters
from celery_dlq.operations import removal
url, job, broker = sys.argv[1:]
app = an_app(dlq_url=url, **({"broker_url": url} if broker == "redis" else {}))
app.conf.task_default_queue = "orders"
dlq = DeadLetters(app)
if dlq.job(job).kind == "redrive":
    from celery_dlq.operations.redrive.claimed import ByClaims
    inner = ByClaims.wait_for_batch
    def wait(self):
        inner(self)
        os.kill(os.getpid(), signal.SIGKILL)
    ByClaims.wait_for_batch = wait
else:
    inner = removal.Discard.remove
    def remove(self, keys):
        inner(self, keys)
        os.kill(os.getpid(), signal.SIGKILL)
    removal.Discard.remove = remove
dlq.start(job)
dlq.assembly.jobs().run_next(lambda: False)
"""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("operators", ["redis", "elsewhere"], indirect=True)
def test_a_plan_that_was_killed_takes_no_other_letters(
    operators: Operators, request: pytest.FixtureRequest, kind: str
) -> None:
    """Its process dies after a batch, before it could say how many letters that had."""
    dlq = operators()
    ids = put(dlq, 15)
    plan = dlq.plan(kind, DLQ, limit=10)
    url, broker = request.getfixturevalue("redis_url"), request.node.callspec.params["operators"]
    done = run_forked("-c", DIES, url, plan.id, broker)
    assert done.returncode == -signal.SIGKILL, done.stderr
    poll(lambda: dlq.job(plan.id).state == "interrupted", timeout_seconds=30)
    gone = 15 - dlq.store.length(DLQ)
    assert [dlq.job(plan.id).changed, *(job.changed for job in dlq.jobs())] == [gone, gone]
    page = Pages(dlq).handle(get(f"/jobs/{plan.id}"))
    assert page.status == 200
    assert (b"Restore what it discarded" in page.body) == (kind == "discard")
    dlq.resume(plan.id)
    assert left(dlq) == set(ids[10:])


@pytest.mark.parametrize("operators", ["redis", "elsewhere"], indirect=True)
def test_letters_of_a_removal_that_was_killed_are_not_called_published(
    operators: Operators, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had claimed them, and removed none."""
    dlq = operators()
    put(dlq, 3)
    monkeypatch.setattr(timing, "current", replace(timing.current, claim=0.0))

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Letters, "remove", interrupted)
        dlq.discard(DLQ)
    monkeypatch.undo()
    report = dlq.redrive(DLQ)
    assert (report.published, report.maybe_twice) == (3, 0)


DIES_LIMITED = """
import os, signal, sys
from builders import DLQ, an_app
from celery_dlq import DeadLetters
from celery_dlq.operations import removal
inner, batches = removal.Discard.remove, []
def remove(self, keys):
    inner(self, keys)
    batches.append(keys)
    if len(batches) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
removal.Discard.remove = remove
removal.LETTERS_PER_BATCH = 4
DeadLetters(an_app(dlq_url=sys.argv[1])).purge(DLQ, limit=10)
"""


@pytest.mark.parametrize("operators", ["redis"], indirect=True)
def test_a_limited_removal_that_was_killed_takes_no_other_letters(
    operators: Operators, redis_url: str
) -> None:
    """Its counts may be a second old, so resumed, it would take more than its limit."""
    dlq = operators()
    ids = put(dlq, 25)
    done = run_forked("-c", DIES_LIMITED, redis_url)
    assert done.returncode == -signal.SIGKILL, done.stderr
    (job,) = dlq.jobs()
    poll(lambda: dlq.job(job.id).state == "interrupted", timeout_seconds=30)
    dlq.resume(job.id)
    assert left(dlq) == set(ids[10:])


# -- starting ---------------------------------------------------------------------------


def test_a_plan_is_started_once_whoever_clicks(
    operators: Operators, runners: Callable[[DeadLetters], Runner]
) -> None:
    """Ten clicks of two operators, two processes that run jobs: one job, each letter once."""
    one, two = operators(), operators()
    ids = put(one, 30)
    plan = one.plan("redrive", DLQ)
    gone, gone_too = went(one), went(two)
    started: list[Any] = []
    threads = [
        threading.Thread(target=lambda dlq=dlq: started.append(dlq.start(plan.id)))
        for dlq in (one, two) * 5
    ]
    runners(one)
    runners(two)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {job.id for job in started} == {plan.id}
    job = ended(one, plan.id)
    assert (job.run, job.counts["published"]) == (1, 30)
    assert sorted([*gone, *gone_too]) == sorted(ids)
    assert one.start(plan.id).state == "done"
    poll(one.changes)  # is written after the end of the job
    assert len([c for c in one.changes() if c.detail.get("job") == plan.id]) == 1


def test_a_job_names_who_started_it(
    operators: Operators, runners: Callable[[DeadLetters], Runner]
) -> None:
    """In the job and in the audit, though another process runs it."""
    dlq = operators()
    put(dlq)
    with acting_as("ann"):
        plan = dlq.plan("purge", DLQ)
    with acting_as("bob\x1b[31m\n"):
        dlq.start(plan.id)
    runners(operators())
    job = ended(dlq, plan.id)
    assert plan.actor.startswith("ann via ")
    assert job.actor.startswith("bob\\x1b[31m via ")
    (change,) = poll(dlq.changes)  # is written after the end of the job
    assert change.actor == job.actor


def test_what_has_not_begun_is_cancelled_at_once(operators: Operators) -> None:
    """A plan, and a job that waits; neither runs, until somebody resumes it."""
    dlq = operators()
    ids = put(dlq, 2)
    plan, waiting = dlq.plan("purge", DLQ).id, dlq.plan("purge", DLQ).id
    dlq.start(waiting)
    assert [dlq.cancel(job_id).state for job_id in (plan, waiting)] == ["cancelled", "cancelled"]
    assert dlq.start(waiting).state == "cancelled"
    assert dlq.assembly.jobs().run_next(lambda: False) is None
    assert left(dlq) == set(ids)
    assert dlq.resume(waiting).to_json()["removed"] == 2


# -- running ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["redrive", "discard"])
def test_a_closed_runner_leaves_its_job_to_the_next(
    operators: Operators,
    runners: Callable[[DeadLetters], Runner],
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    """It ends between two batches; nothing is done twice, nothing is left out."""
    monkeypatch.setattr("celery_dlq.operations.removal.LETTERS_PER_BATCH", 2)
    one, two = operators(), operators()
    ids = put(one, 60)
    options: dict[str, Any] = {"rate": 40} if kind == "redrive" else {}
    plan = one.plan(kind, DLQ, **options)
    gone, gone_too = went(one), went(two)
    one.start(plan.id)
    asked: list[int] = []

    def stopping() -> bool:
        asked.append(1)
        return len(asked) > 6

    job = one.assembly.jobs().run_next(stopping)
    assert job is not None
    assert (job.state, job.run, job.ended_at) == ("waiting", 1, None)
    here = left(one)
    assert 0 < len(here) < 60
    (first,) = one.changes()
    assert (first.letters, first.detail["state"]) == (60 - len(here), "waiting")
    runners(two)
    job = ended(one, plan.id)
    assert (job.run, left(two)) == (2, set())
    if kind == "redrive":
        assert sorted([*gone, *gone_too]) == sorted(ids)
        assert (job.counts["published"], job.counts["maybe_twice"]) == (60, 0)
    else:
        assert job.counts["removed"] == 60
    change, _first = one.changes()
    assert (change.letters, change.detail["letters_of_job"]) == (len(here), 60)


@pytest.mark.parametrize("decided", ["cancelled", "waiting", "running"])
def test_a_run_that_was_silent_undoes_nothing_that_others_decided(
    operators: Operators, monkeypatch: pytest.MonkeyPatch, decided: str
) -> None:
    """Its machine stood still: meanwhile its job was cancelled, handed on, or taken over."""
    intervals.change(monkeypatch, job_silent=timedelta(0))
    one = operators()
    jobs = one.assembly.jobs()
    run = jobs.make("redrive", DLQ, LetterFilter(), RedriveOptions())
    run.send_heartbeat()
    if decided == "cancelled":
        jobs.cancel(run.job.id)
    elif decided == "waiting":
        jobs.resume_in_background(run.job.id)
    else:
        jobs.begin_again(run.job.id)
    stored = one.job_store.read(run.job.id)
    with pytest.raises(CancelledError):
        run.send_heartbeat(now=True)
    run.end("done", {})
    assert one.job_store.read(run.job.id) == stored
    assert stored is not None
    assert stored["state"] == decided


def test_a_job_that_was_taken_is_ours_though_the_reply_was_lost(redis_server: RedisServer) -> None:
    """The client asks again, and finds the job taken: by itself."""
    redis_server.client().flushall()
    with SlowProxy(redis_server.port, asked=b'"run":2', lost=1) as proxy:
        proxy.open()
        url = redis_server.url.replace(str(redis_server.port), str(proxy.port))
        dlq = DeadLetters(an_app(dlq_url=url))
        jobs = dlq.assembly.jobs()
        run = jobs.make("redrive", DLQ, LetterFilter(), RedriveOptions())
        run.send_heartbeat()
        run.end("cancelled", {})
        assert jobs.begin_again(run.job.id).job.run == 2
        assert proxy.lost == 0
        dlq.close()


def test_a_runner_closes_while_a_job_waits_for_its_rate(
    operators: Operators, runners: Callable[[DeadLetters], Runner]
) -> None:
    """Within seconds, with a rate of hours."""
    dlq = operators()
    put(dlq, 10)
    plan = dlq.plan("redrive", DLQ, rate=0.001)
    dlq.start(plan.id)
    runner = runners(dlq)
    ended(dlq, plan.id, "running")
    assert runner.close(10)
    job = dlq.job(plan.id)
    assert job.state == "waiting"
    assert len(left(dlq)) == 10 - job.counts["published"] >= 9


def test_a_running_job_is_cancelled_from_elsewhere_and_resumed_in_the_background(
    operators: Operators, runners: Callable[[DeadLetters], Runner]
) -> None:
    """Twice resumed is resumed once."""
    one, two = operators(), operators()
    put(one, 8)
    plan = one.plan("redrive", DLQ, rate=1)
    one.start(plan.id)
    runners(one)
    ended(two, plan.id, "running")
    two.cancel(plan.id)
    ended(two, plan.id, "cancelled")
    state = two.job_store.read(plan.id) or {}
    two.job_store.write(plan.id, {**state, "options": {}})
    with acting_as("eve"):
        assert two.resume_in_background(plan.id).state == "waiting"
    two.resume_in_background(plan.id)
    job = ended(two, plan.id)
    assert job.actor.startswith("eve via ")
    assert (job.counts["published"], left(one)) == (8, set())
    with pytest.raises(DLQError, match="which is done"):
        two.resume_in_background(plan.id)


def test_a_job_that_fails_says_why_and_the_next_one_runs(
    operators: Operators,
    runners: Callable[[DeadLetters], Runner],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The runner survives any error."""
    dlq = operators()
    put(dlq, 2)
    bad, good = dlq.plan("redrive", DLQ).id, dlq.plan("purge", DLQ).id
    nothing: dict[str, str] = {}
    kind = replace(api.KINDS["redrive"], operation=lambda *_: nothing["no such key"])
    monkeypatch.setitem(api.KINDS, "redrive", kind)
    dlq.start(bad)
    dlq.start(good)
    runners(dlq)
    assert "KeyError" in ended(dlq, bad, "failed").note
    assert ended(dlq, good).counts["removed"] == 2


def test_a_job_lists_the_first_letters_that_failed(
    operators: Operators, runners: Callable[[DeadLetters], Runner]
) -> None:
    """With the reason, short; all of them are counted, and stay."""
    dlq = operators()
    ids = put(dlq, 25, source_queue="")
    plan = dlq.plan("redrive", DLQ, force=True)
    dlq.start(plan.id)
    runners(dlq)
    job = ended(dlq, plan.id)
    assert (job.counts["failures"], len(job.failed)) == (25, 20)
    assert set(job.failed) < set(ids) == left(operators())
    for error in job.failed.values():
        assert "does not name its source queue" in error
        assert len(error) <= 300


# -- edits ------------------------------------------------------------------------------


def test_a_planned_edit_shows_before_and_after_and_tells_nobody_else(
    operators: Operators, runners: Callable[[DeadLetters], Runner]
) -> None:
    """The values are in the message alone: jobs and audit name the paths."""
    dlq = operators()
    (letter_id,) = put(dlq, body=b'[["old-secret"], {"tenant": 1}, {}]')
    where = LetterFilter(ids=frozenset({letter_id}))
    change = Edit(assign={"args.0": "new-secret", "kwargs.tenant": 2})
    with acting_as("ann"):
        plan = dlq.plan("edit", DLQ, where, change=change)
    before, after = operators().edited_arguments(plan.id)
    assert before == {"args": ["old-secret"], "kwargs": {"tenant": 1}}
    assert after == {"args": ["new-secret"], "kwargs": {"tenant": 2}}
    with acting_as("bob"):
        dlq.start(plan.id)
    runners(operators())
    job = ended(dlq, plan.id)
    assert left(dlq) == set()
    assert job.options["changed"] == ["args.0", "kwargs.tenant"]
    changes = [change.to_json() for change in dlq.changes()]
    assert [change["action"] for change in changes] == ["edited"]
    told = json.dumps([job.to_json(), changes, dict(job.preview)])
    assert "secret" not in told
    with pytest.raises(NotFound):
        dlq.edited_arguments(plan.id)


def test_an_edit_that_was_paused_goes_on_with_its_change(operators: Operators) -> None:
    """The change is kept with the job, and one that is too long is refused."""
    dlq = operators()
    (letter_id,) = put(dlq, body=b"[[1], {}, {}]")
    where = LetterFilter(ids=frozenset({letter_id}))
    plan = dlq.plan("edit", DLQ, where, change=Edit(args=[2]))
    dlq.start(plan.id)
    job = dlq.assembly.jobs().run_next(lambda: True)
    assert job is not None
    assert (job.state, left(dlq)) == ("waiting", {letter_id})
    assert dlq.resume(plan.id).to_json()["published"] == 1
    (long_id,) = put(dlq, body=b"[[1], {}, {}]")
    with pytest.raises(DLQError, match="change of at most 262,144"):
        where = LetterFilter(ids=frozenset({long_id}))
        dlq.plan("edit", DLQ, where, change=Edit(args=["x" * 270_000]))


def test_job_ids_of_one_millisecond_differ() -> None:
    """Two operators plan at once."""
    jobs = jobs_on(fresh_store())
    options = DiscardOptions()
    ids = {jobs.make("purge", DLQ, LetterFilter(), options).job.id for _ in range(100)}
    assert len(ids) == 100
