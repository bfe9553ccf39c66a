"""The rounds of automatic redrives on a real store: what is due goes, once; the rest waits."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

import intervals
import pytest
from builders import DLQ, a_letter, a_request, an_app, key_of
from waiting import poll

from celery_dlq import DeadLetters
from celery_dlq.features.auto_redrive import operations as module
from celery_dlq.features.auto_redrive.operations import ACTOR, MOST_LETTERS, Cursor
from celery_dlq.letters.record import EPOCH, Reason
from celery_dlq.operations.job import Job
from celery_dlq.operations.policies import PolicyAdmin
from celery_dlq.operations.removal import Removal
from celery_dlq.store.records import RedriveOutcome

Make = Callable[..., DeadLetters]
SOON = {"after": 0.05, "times": 3, "backoff": 1}


@pytest.fixture(params=["redis", pytest.param("elsewhere", marks=pytest.mark.full)])
def make(request: pytest.FixtureRequest, redis_url: str) -> Iterator[Make]:
    """Make an app with a policy of ``orders``; all share one store. Its broker is there or not."""
    made: list[DeadLetters] = []

    def an_operator(**rule: Any) -> DeadLetters:
        policy = {"auto_redrive": {**SOON, **rule}}
        values: dict[str, Any] = {"dlq_url": redis_url, "dlq_queues": {"orders": policy}}
        if request.param == "redis":
            values["broker_url"] = redis_url
        app = an_app(**values)
        app.conf.task_default_queue = "orders"
        made.append(DeadLetters(app))
        return made[-1]

    published(an_operator())  # a broker in memory lasts as long as the process
    yield an_operator
    for dlq in made:
        dlq.close()


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A change of a policy begins now."""
    intervals.change(monkeypatch, grace=timedelta(0))


def put(dlq: DeadLetters, count: int = 1, **changes: Any) -> list[str]:
    """Store letters; return their ids once the first rule lets them go."""
    ids = []
    for _ in range(count):
        letter = a_letter(properties='{"priority": 0}', **changes)
        headers = a_request(id=letter.task_id, root_id=letter.task_id)
        letter = replace(letter, headers=json.dumps(headers))
        dlq.store.dead_letter(letter, key_of(letter))
        ids.append(letter.id)
    aged(dlq, 0.05)
    return ids


def aged(dlq: DeadLetters, seconds: float) -> None:
    """Wait until what is there is so old."""
    stored = dlq.store.now()
    poll(lambda: dlq.store.now() - stored > timedelta(seconds=seconds + 0.01))


def look(dlq: DeadLetters, stopping: Callable[[], bool] = bool) -> list[Job]:
    """What a worker does until nothing is due: the jobs that it ran to their ends."""
    done = []
    with dlq.assembly.separate() as own:
        jobs = own.jobs()
        while module.look_for_due(jobs, jobs.policies.in_force()):
            job = jobs.run_next(stopping)
            if job is None or job.state == "waiting":
                break
            done.append(job)
    return done


def stopping_soon() -> Callable[[], bool]:
    """Becomes true after some batches."""
    asked = itertools.count()
    return lambda: next(asked) > 5


def left(dlq: DeadLetters) -> set[str]:
    """The ids of the letters that are still there."""
    return {letter.id for letter in dlq.letters(DLQ)}


def published(dlq: DeadLetters) -> int:
    """How many messages wait in the queue, and are taken out."""
    found = 0
    with dlq.app.connection_for_read() as connection:
        queue = dlq.app.amqp.queues["orders"](connection.default_channel)
        queue.declare()
        while queue.get(no_ack=True) is not None:
            found += 1
    return found


def test_what_is_due_is_redriven_as_a_job(make: Make) -> None:
    """Job and audit name who did it; a second look finds nothing and makes no job."""
    dlq = make()
    put(dlq, 7)
    (job,) = look(dlq)
    assert (job.state, job.actor, job.counts["published"]) == ("done", ACTOR, 7)
    assert (left(dlq), published(dlq)) == (set(), 7)
    (change,) = dlq.changes()
    assert (change.actor, change.letters, change.detail["job"]) == (ACTOR, 7, job.id)
    assert look(dlq) == []
    assert [each.id for each in dlq.jobs()] == [job.id]


def test_a_letter_waits_until_it_is_due(make: Make) -> None:
    """Nothing goes early, by the store's clock; not even a job is made."""
    dlq = make(after=3600)
    ids = put(dlq, 2, dead_lettered_at=EPOCH)
    assert look(dlq) == []
    assert (left(dlq), dlq.jobs()) == (set(ids), [])


def test_a_letter_that_died_again_waits_longer_and_the_last_stays(make: Make) -> None:
    """Once for each redrive before, the backoff; after the last one, it waits for a person."""
    dlq = make(times=2, backoff=100)
    (fresh,) = put(dlq)
    (again,) = put(dlq, redrives=1)
    (last,) = put(dlq, redrives=2)
    look(dlq)
    assert left(dlq) == {again, last}
    assert fresh not in left(dlq)
    other = make(times=2, backoff=1)
    look(other)
    assert left(dlq) == {last}
    assert look(other) == []


def test_only_the_reasons_of_the_policy(make: Make) -> None:
    """A policy that allows more later finds what was passed by before."""
    dlq = make(reasons=["failed"])
    put(dlq, 2)
    (other,) = put(dlq, reason=Reason.EXPIRED)
    look(dlq)
    assert left(dlq) == {other}
    look(make())
    assert left(dlq) == set()


def test_a_queue_without_the_key_is_left_alone(make: Make) -> None:
    """And so is one whose override says ``off``, while it lasts."""
    dlq = make()
    ids = put(dlq, 2)
    dlq.override_policy("orders", timedelta(hours=1), auto_redrive="off")
    assert look(dlq) == []
    assert left(dlq) == set(ids)
    dlq.lift_policy("orders")
    assert [job.state for job in look(dlq)] == ["done"]
    (elsewhere,) = put(dlq, dead_letter_queue="mail-DLQ", source_queue="mail")
    assert look(dlq) == []
    assert dlq.get(elsewhere, "mail-DLQ") is not None


def test_a_change_begins_a_minute_later_and_can_be_taken_back(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Meanwhile and after it was lifted nothing is redriven, in whichever process."""
    dlq = make()
    ids = put(dlq, 2)
    intervals.change(monkeypatch, grace=timedelta(minutes=1))
    dlq.override_policy("orders", timedelta(hours=1), auto_redrive={**SOON, "times": 9})
    assert look(dlq) == []
    dlq.lift_policy("orders")
    assert look(dlq) == []
    assert left(dlq) == set(ids)


def test_a_change_says_how_many_letters_it_would_redrive(make: Make) -> None:
    """Sooner or later; those whose message was redriven too often, or of other reasons, stay."""
    dlq = make()
    put(dlq, 3)
    put(dlq, redrives=1)
    put(dlq, reason=Reason.EXPIRED)
    admin, span = PolicyAdmin(dlq.assembly), timedelta(hours=1)
    said = []
    for more in ({"times": 1}, {"times": 2}, {"times": 2, "reasons": ["expired"]}):
        made = admin.check_override("orders", span, auto_redrive={"after": "1h", **more})
        effect = Removal(dlq.assembly).policy_effect_on(
            "orders", frozenset({"auto_redrive"}), admin.after(made)
        )
        said.append(effect.redriven)
    assert said == [4, 5, 1]


def test_two_workers_at_once_make_one_job(make: Make) -> None:
    """The second finds the lease taken; each message goes out once."""
    workers = [make() for _ in range(4)]
    put(workers[0], 300)
    jobs: list[Job] = []
    threads = [threading.Thread(target=lambda dlq=dlq: jobs.extend(look(dlq))) for dlq in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [job.counts["published"] for job in jobs] == [300]
    if "redis" in workers[0].app.conf.broker_url:
        assert published(workers[0]) == 300
    assert left(workers[0]) == set()


def test_what_would_be_lost_stays_and_is_tried_after_the_wait(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not keep others back, and makes no job at each look."""
    dlq = make(after=0.5)
    (lost,) = put(dlq, source_queue="gone")
    put(dlq, 3)

    def loss(_targets: Any, found: Any) -> str:
        return "no such queue" if found.text("source_queue") == "gone" else ""

    monkeypatch.setattr("celery_dlq.operations.redrive.checks.Targets.reason_of_loss", loss)
    aged(dlq, 0.5)
    (job,) = look(dlq)
    assert (job.counts["published"], job.counts["refused"]) == (3, 1)
    assert (left(dlq), look(dlq)) == ({lost}, [])
    (more,) = put(dlq)
    poll(lambda: (look(dlq), more not in left(dlq))[1])
    assert left(dlq) == {lost}
    monkeypatch.undo()
    poll(lambda: (look(dlq), left(dlq) == set())[1])
    assert len(dlq.jobs()) <= 6


def test_if_the_canary_dies_the_rest_waits(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """One message is tried in each wait, not one at each look."""
    dlq = make(canary=1, after=1)
    put(dlq, 4)
    died = RedriveOutcome.DIED
    monkeypatch.setattr(
        "celery_dlq.store.claims.Claims.outcomes",
        lambda _, keys: [died for _ in keys],
    )
    aged(dlq, 1)
    (job,) = look(dlq)
    assert (job.state, job.counts["published"], job.note) == (
        "stopped",
        1,
        "1 of 1 letters of the canary died again",
    )
    assert (look(dlq), len(left(dlq))) == ([], 3)
    (again,) = poll(lambda: look(dlq))
    assert (again.state, len(left(dlq))) == ("stopped", 2)


def test_there_is_one_canary_at_a_time(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not one for each number of redrives; and each number has its turn."""
    dlq = make(canary=2, after=1)
    for redrives in range(3):
        put(dlq, 4, redrives=redrives)
    died = RedriveOutcome.DIED
    monkeypatch.setattr(
        "celery_dlq.store.claims.Claims.outcomes",
        lambda _, keys: [died for _ in keys],
    )
    aged(dlq, 1)
    turns = []
    for left_over in (10, 8, 6, 4):
        (job,) = poll(lambda: look(dlq))
        assert (job.state, job.counts["published"]) == ("stopped", 2)
        assert (look(dlq), len(left(dlq))) == ([], left_over)
        turns.append(job.options["due"]["redrives"])
    assert sorted(turns[:3]) == [0, 1, 2]
    assert turns[3] == turns[0]


def test_a_job_that_was_paused_is_finished_by_another_process(make: Make) -> None:
    """A worker that stops leaves its job to the next; meanwhile nobody makes a second one."""
    one, two = make(), make()
    put(one, 250)
    assert look(one, stopping_soon()) == []
    (job,) = one.jobs()
    assert job.state == "waiting"
    waiting = two.assembly.jobs()
    assert module.look_for_due(waiting, waiting.policies.in_force())
    assert [each.id for each in two.jobs()] == [job.id]
    ran = two.assembly.jobs().run_next(lambda: False)
    assert ran is not None
    assert (ran.id, ran.state, ran.counts["published"]) == (job.id, "done", 250)
    assert left(one) == set()
    assert look(two) == []


def test_a_job_whose_process_was_killed_is_resumed(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another worker takes the lease once it is over, and goes on with the job: nothing twice."""
    one, two = make(), make()
    put(one, 250)
    intervals.change(monkeypatch, redrive_lease=0.2)

    def killed(*_: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as dying:
        dying.setattr("celery_dlq.operations.job.JobRun.end", killed)
        dying.setattr("celery_dlq.operations.redrive.one_step.OneStep.count_sent", killed)
        dying.setattr("celery_dlq.operations.redrive.claimed.ByClaims.mark_and_remove", killed)
        with pytest.raises(KeyboardInterrupt):
            look(one)
    (job,) = one.jobs()
    one.job_store.write(job.id, {**job.to_stored(), "pid": 2**22 + 1})
    assert one.job(job.id).state == "interrupted"
    poll(lambda: (look(two), one.job(job.id).state == "done")[1])
    assert [each.id for each in one.jobs()] == [job.id]
    assert one.job(job.id).counts["published"] + one.job(job.id).counts["finished"] == 250
    assert left(one) == set()


def test_a_policy_that_was_removed_while_a_job_waited_is_obeyed(make: Make) -> None:
    """The job ends and says why; the letters stay."""
    dlq = make()
    ids = put(dlq, 250)
    look(dlq, stopping_soon())
    here = left(dlq)
    (job,) = dlq.jobs()
    dlq.override_policy("orders", timedelta(hours=1), auto_redrive=False)
    with pytest.raises(Exception, match="has changed since it made this job"):
        dlq.assembly.jobs().run_next(lambda: False)
    assert dlq.job(job.id).state == "failed"
    assert "has changed since it made this job" in dlq.job(job.id).note
    assert left(dlq) == here <= set(ids)


def test_a_cancelled_job_rests(make: Make) -> None:
    """What a person stopped is not started again at the next look."""
    dlq = make(after=2)
    put(dlq, 250)
    aged(dlq, 2)
    look(dlq, stopping_soon())
    (job,) = dlq.jobs()
    assert dlq.cancel(job.id).state == "cancelled"
    here = left(dlq)
    assert (look(dlq), left(dlq)) == ([], here)


def test_letters_are_read_once_for_each_number(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The place is remembered between looks, by whoever looks."""
    dlq = make(times=1)
    put(dlq, 1200, redrives=1)
    monkeypatch.setattr(module, "MOST_SCANNED", 500)
    read: list[int] = []
    fields = type(dlq.store).fields

    def counted(store: Any, *args: Any, **kwargs: Any) -> Any:
        for page in fields(store, *args, **kwargs):
            read.append(len(page))
            yield page

    monkeypatch.setattr(type(dlq.store), "fields", counted)
    for _ in range(5):
        assert look(dlq) == []
        assert look(make(times=1)) == []
    assert sum(read) == 1200
    (due,) = put(dlq)
    assert [job.counts["published"] for job in look(dlq)] == [1]
    assert due not in left(dlq)


def test_old_jobs_of_the_policy_are_forgotten(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """They must not push out those of people."""
    monkeypatch.setattr(module, "JOBS_KEPT", 2)
    dlq = make()
    put(dlq)
    mine = dlq.redrive(DLQ).redrive_id
    for _ in range(4):
        put(dlq)
        look(dlq)
    actors = [job.actor for job in dlq.jobs()]
    assert actors.count(ACTOR) == 2
    assert mine in {job.id for job in dlq.jobs()}


def job_of(state: str = "done", **counts: int) -> Job:
    """A job that ended."""
    return Job(
        id="1",
        kind="redrive",
        queue=DLQ,
        state=state,
        started_at=EPOCH,
        updated_at=EPOCH,
        until="9-0",
        counts=counts,
    )


def test_the_cursor_moves_behind_what_is_done() -> None:
    """It stays where more may be, comes back for what was left, and rests after a stop."""
    start = Cursor(position="3-0")

    def after(job: Job) -> Cursor:
        return start.after_job(job, "3-0", 60, EPOCH)

    assert after(job_of(published=5)) == Cursor(position="9-0")
    assert after(job_of(published=MOST_LETTERS)) == Cursor(position="3-0")
    left_behind = after(job_of(published=5, failures=1))
    assert left_behind == Cursor(position="9-0", back_to="3-0", back_at=60_000_000)
    assert left_behind.starting_at(EPOCH) == left_behind
    assert left_behind.starting_at(EPOCH + timedelta(seconds=60)) == Cursor(position="3-0")
    assert after(job_of("stopped")) == Cursor(position="3-0", pause_until=60_000_000)
