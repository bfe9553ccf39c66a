"""The pytest fixture ``dead_letters``: eager tasks, embedded workers, what is left behind."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch
from uuid import uuid4

import pytest
from celery import Celery, _state, current_app, shared_task
from celery.app.task import Task
from celery.contrib.testing.worker import start_worker
from celery.exceptions import Ignore, Reject
from celery.worker import state as worker_state
from fresh import fresh_conf
from waiting import poll

from celery_dlq import DeadLetters, Outcome, Reason, RejectToDLQ, dead_letter_policy
from celery_dlq.errors import DLQError, MaxDeliveriesExceeded, SettingsError
from celery_dlq.testing import WatchedLetters, plugin

pytest_plugins = ["pytester"]

dead_letters = plugin.dead_letters
"""The fixture, also where the package is not installed with its entry points."""

EAGER = {"task_always_eager": True}
"""Settings of tests without a worker."""


def charge(self: Any, order_id: int) -> int:
    self.app.ran.append(order_id)
    if order_id < 0:
        raise RejectToDLQ("no such order")
    return order_id


def fails(self: Any, text: str = "no price") -> None:
    raise LookupError(text)


def expected(self: Any) -> None:
    raise KeyError("as planned")


def requeues(self: Any) -> None:
    self.app.ran.append("requeues")
    raise Reject("not now", requeue=True)


def ignored(self: Any) -> None:
    raise Ignore


def retries(self: Any) -> None:
    self.app.ran.append("retries")
    raise self.retry(exc=ConnectionError("partner is down"), countdown=0)


@dead_letter_policy(max_retries=2)
def patient(self: Any) -> None:
    self.app.ran.append("patient")
    raise self.retry(countdown=0)


def waits(self: Any) -> None:
    self.app.may_end.wait(10)
    raise LookupError("after all")


def applies(self: Any) -> None:
    self.app.tasks["shop.fails"].apply()


def exits(self: Any) -> None:
    raise SystemExit(3)


TASKS: list[tuple[Callable[..., Any], dict[str, Any]]] = [
    (charge, {}),
    (fails, {}),
    (expected, {"throws": (KeyError,)}),
    (requeues, {}),
    (ignored, {}),
    (retries, {"max_retries": 2}),
    (patient, {"max_retries": None}),
    (waits, {}),
    (applies, {}),
    (exits, {}),
]


def a_shop() -> SimpleNamespace:
    """An app as users write it, with one task for every way to end."""
    name = f"orders-{uuid4().hex[:8]}"
    app = Celery("shop", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.ran, app.may_end = [], threading.Event()
    app.conf.update(
        task_acks_late=True,
        task_default_queue=name,
        broker_connection_retry_on_startup=True,
        broker_transport_options={"polling_interval": 0.01},
        dlq_url="redis://127.0.0.1:1/0",  # nobody answers there
        dlq_queues={name: {"max_deliveries": 3}},
    )
    app.conf.get("dlq_url")  # from now on it is configured
    tasks = {
        function.__name__: app.task(
            function, name=f"shop.{function.__name__}", bind=True, shared=False, **options
        )
        for function, options in TASKS
    }
    return SimpleNamespace(
        app=app, dlq=DeadLetters(app), queue=name, letters=f"{name}-DLQ", ran=app.ran, **tasks
    )


@pytest.fixture
def shop() -> SimpleNamespace:
    """An app of its own for each test."""
    return a_shop()


@pytest.fixture
def current() -> Iterator[None]:
    """Let a test change the current app; afterwards it is what it was before."""
    before, default = _state._tls.current_app, _state.default_app
    yield
    _state._tls.current_app, _state.default_app = before, default


@pytest.fixture
def running(current: None) -> Callable[..., AbstractContextManager[Any]]:
    """Start embedded workers; the app of each becomes the current one."""

    @contextmanager
    def run(app: Celery, **more: Any) -> Iterator[Any]:
        with start_worker(app, perform_ping_check=False, shutdown_timeout=20, **more) as worker:
            yield worker
            # It looks for these only between two events, or every two seconds.
            worker_state.should_terminate = 0
            for _ in range(2):
                app.control.broadcast("clock")

    return run


# -- eager ------------------------------------------------------------------------------


def test_an_eager_task_that_rejects_is_dead_lettered(
    shop: SimpleNamespace, dead_letters: WatchedLetters
) -> None:
    """The letter is what a worker would have made of the message."""
    dead_letters.watch(shop.app, **EAGER)
    result = shop.charge.delay(-1)

    letter = dead_letters.assert_dead_lettered(
        result, reason="rejected", description="no such order"
    )

    assert (letter.task_name, letter.args_json, letter.kwargs_json) == ("shop.charge", "[-1]", "{}")
    assert (letter.source_queue, letter.dead_letter_queue) == (shop.queue, shop.letters)
    assert (letter.deliveries, letter.max_deliveries) == (1, 3)
    assert [d.outcome for d in letter.history] == [Outcome.REJECTED]


@pytest.mark.parametrize("propagates", [False, True])
def test_an_eager_failure_is_neither_a_result_nor_a_raised_exception(
    shop: SimpleNamespace, dead_letters: WatchedLetters, propagates: bool
) -> None:
    """Both ways of eager Celery to report an exception lead to the same letter."""
    dead_letters.watch(shop.app, task_eager_propagates=propagates, **EAGER)
    if propagates:
        with pytest.raises(LookupError):
            shop.fails.delay()
    else:
        assert shop.fails.delay().failed()

    letter = dead_letters.assert_dead_lettered(shop.fails, reason=Reason.FAILED)

    assert (letter.exception_type, letter.description) == ("LookupError", "no price")
    assert "in fails" in (letter.traceback or "")


def test_exceptions_that_a_policy_names_end_as_it_says(
    shop: SimpleNamespace, dead_letters: WatchedLetters
) -> None:
    """As on a worker: retried by Celery, dead-lettered elsewhere, or ignored."""
    shop.app.conf.dlq_queues = {
        shop.queue: {
            "exceptions": {
                "LookupError": {"action": "retry", "max_retries": 2},
                "ConnectionError": {"action": "dead_letter", "dead_letter_queue": "fatal-DLQ"},
                "Exception": {"action": "ignore"},
            }
        }
    }
    dead_letters.watch(shop.app, **EAGER)

    assert shop.fails.delay().failed()
    assert shop.retries.delay().failed()
    assert shop.requeues.delay().state == "REJECTED"

    letter = dead_letters.assert_dead_lettered(shop.fails, reason="max_retries_exceeded")
    assert [d.outcome for d in letter.history] == [Outcome.RETRIED, Outcome.RETRIED, Outcome.FAILED]
    assert letter.max_retries == 2
    assert (letter.dead_letter_queue, letter.source_queue) == (shop.letters, shop.queue)
    elsewhere = dead_letters.assert_dead_lettered(shop.retries)
    assert (elsewhere.dead_letter_queue, elsewhere.source_queue) == ("fatal-DLQ", shop.queue)


def test_apply_counts_as_a_message_without_eager_mode(
    shop: SimpleNamespace, dead_letters: WatchedLetters
) -> None:
    """A test that calls ``task.apply()`` stands for the worker."""
    dead_letters.watch(shop.app)
    shop.fails.apply()
    dead_letters.assert_dead_lettered("shop.fails")


def test_a_task_that_applies_another_one_sends_no_message(
    shop: SimpleNamespace, dead_letters: WatchedLetters
) -> None:
    """In production that inner call makes no letter, so it makes none here."""
    dead_letters.watch(shop.app)
    shop.applies.apply()
    dead_letters.assert_none()


@pytest.mark.parametrize(("name", "args"), [("charge", (1,)), ("expected", ()), ("ignored", ())])
def test_what_is_no_death_leaves_no_letter(
    shop: SimpleNamespace, dead_letters: WatchedLetters, name: str, args: tuple[Any, ...]
) -> None:
    """Success, the task's own ``throws`` and ``Ignore``."""
    dead_letters.watch(shop.app, **EAGER)
    getattr(shop, name).delay(*args)
    dead_letters.assert_none()
    assert dead_letters.letters() == []


def test_eager_retries_are_spent_and_their_history_is_kept(
    shop: SimpleNamespace, dead_letters: WatchedLetters
) -> None:
    """Every retry is a message of its own, in the queue of the first."""
    dead_letters.watch(shop.app, **EAGER, dlq_queues={"vip": {}})
    shop.retries.apply_async(queue="vip")

    letter = dead_letters.assert_dead_lettered(
        shop.retries, reason="max_retries_exceeded", description="partner is down", retries=2
    )

    assert [d.outcome for d in letter.history] == [
        Outcome.RETRIED,
        Outcome.RETRIED,
        Outcome.FAILED,
    ]
    assert letter.dead_letter_queue == "vip-DLQ"


@pytest.mark.parametrize("propagates", [False, True])
def test_max_retries_of_a_policy_ends_eager_retries_that_have_no_end(
    shop: SimpleNamespace, dead_letters: WatchedLetters, propagates: bool
) -> None:
    """The third retry is not executed, as by a worker."""
    dead_letters.watch(shop.app, **EAGER)
    if propagates:
        with pytest.raises(Exception, match="max_retries is 2"):
            shop.patient.apply(retries=3, throw=True)
        assert shop.ran == []
    else:
        assert shop.patient.delay().failed()
        assert shop.ran == ["patient"] * 3
    dead_letters.assert_dead_lettered(shop.patient, reason="max_retries_exceeded", retries=3)


def test_applying_a_requeued_message_again_counts_its_deliveries(
    shop: SimpleNamespace, dead_letters: WatchedLetters
) -> None:
    """Eager Celery delivers nothing again; the test may do it by the task's id."""
    dead_letters.watch(shop.app)
    for _ in range(3):
        shop.requeues.apply(task_id="again")
    dead_letters.assert_none()

    result = shop.requeues.apply(task_id="again")

    letter = dead_letters.assert_dead_lettered(result, reason="max_deliveries_exceeded")
    assert letter.deliveries == len(shop.ran) == 3
    with pytest.raises(MaxDeliveriesExceeded):
        result.get()


def test_an_eager_exit_is_no_letter_but_a_delivery(
    shop: SimpleNamespace, dead_letters: WatchedLetters
) -> None:
    """A process that ends takes its message back to the queue."""
    dead_letters.watch(shop.app)
    for _ in range(3):
        with pytest.raises(SystemExit):
            shop.exits.apply(task_id="exits")
    dead_letters.assert_none()
    shop.exits.apply(task_id="exits")
    letter = dead_letters.assert_dead_lettered(shop.exits, deliveries=3)
    assert [d.outcome for d in letter.history] == [Outcome.VANISHED] * 3


def test_arguments_that_could_not_be_published_do_not_hide_the_letter(
    shop: SimpleNamespace, dead_letters: WatchedLetters
) -> None:
    """``apply()`` takes anything; the letter then has no body."""
    dead_letters.watch(shop.app)
    shop.fails.apply((object(),))
    letter = dead_letters.assert_dead_lettered(shop.fails)
    assert (letter.body, letter.args_json) == (b"", None)


def test_a_task_called_as_a_function_is_no_message(
    shop: SimpleNamespace, dead_letters: WatchedLetters
) -> None:
    """Nothing to dead-letter."""
    dead_letters.watch(shop.app, **EAGER)
    with pytest.raises(RejectToDLQ):
        shop.charge(-1)
    dead_letters.assert_none()


# -- an embedded worker -------------------------------------------------------------------


@pytest.mark.parametrize("pool", ["solo", "threads"])
def test_an_embedded_worker_dead_letters_into_memory(
    shop: SimpleNamespace, dead_letters: WatchedLetters, running: Any, pool: str
) -> None:
    """The real guard runs, and the assertion waits for it."""
    dead_letters.watch(shop.app)
    with running(shop.app, pool=pool):
        poison, healthy = shop.charge.delay(-1), shop.charge.delay(7)
        requeued, retried = shop.requeues.delay(), shop.retries.delay()
        letter = dead_letters.assert_dead_lettered(poison, reason="rejected", deliveries=1)
        # Before Celery 5.7, each message that is given back in a pool of threads waits a second.
        dead_letters.assert_none(healthy, timeout_seconds=30)
        dead_letters.assert_dead_lettered(
            requeued, reason="max_deliveries_exceeded", description=re.compile("^requeued.*now")
        )
        dead_letters.assert_dead_lettered(retried, reason="max_retries_exceeded", retries=2)
        assert len(dead_letters.letters(count=3)) == 3
        assert healthy.get(timeout=5) == 7
    assert letter.description == "no such order"
    assert shop.ran.count("requeues") == 3


def test_no_letter_is_only_said_when_all_messages_have_ended(
    shop: SimpleNamespace, dead_letters: WatchedLetters, running: Any
) -> None:
    """A message that is still under way may yet die."""
    dead_letters.watch(shop.app)
    with running(shop.app):
        result = shop.waits.delay()
        with pytest.raises(AssertionError, match=re.escape(f"under way: shop.waits[{result.id}]")):
            dead_letters.assert_none(timeout_seconds=0.1)
        shop.app.may_end.set()
        with pytest.raises(AssertionError, match=r"failed: shop\.waits.*after all"):
            dead_letters.assert_none()


def test_a_mock_of_send_task_leaves_nothing_under_way(
    shop: SimpleNamespace, dead_letters: WatchedLetters
) -> None:
    """A test that looks only at what would be published needs no worker."""
    dead_letters.watch(shop.app)
    with patch("celery.Celery.send_task") as send_task:
        shop.charge.delay(1)
    assert send_task.call_count == 1
    dead_letters.assert_none(timeout_seconds=0)


@pytest.mark.parametrize("protocol", [1, 2])
def test_a_published_message_is_under_way_in_either_protocol(
    shop: SimpleNamespace, dead_letters: WatchedLetters, protocol: int
) -> None:
    """Its publisher may give the id in any form."""
    shop.app.conf.task_protocol = protocol
    dead_letters.watch(shop.app)
    result = shop.app.send_task("shop.charge", (1,), {}, None, None, "order-1")
    with pytest.raises(AssertionError, match=re.escape(f"shop.charge[{result.id}]")):
        dead_letters.assert_none(timeout_seconds=0)


@pytest.mark.parametrize("guarded", [True, False])
def test_no_letter_is_said_soon_after_healthy_work(
    shop: SimpleNamespace, dead_letters: WatchedLetters, running: Any, guarded: bool
) -> None:
    """Guarded or not: successes, failures that no policy keeps, and unknown tasks."""
    if not guarded:
        shop.app.conf.dlq_queues = {}
    dead_letters.watch(shop.app)
    with running(shop.app):
        shop.charge.delay(1)
        shop.expected.delay()
        shop.ignored.delay()
        if not guarded:
            shop.fails.delay()
            shop.app.send_task("shop.nobody_knows")
        dead_letters.assert_none()


def test_a_rejection_from_an_unguarded_queue_is_waited_for(
    shop: SimpleNamespace, dead_letters: WatchedLetters, running: Any
) -> None:
    """`RejectToDLQ` needs no policy."""
    dead_letters.watch(shop.app, dlq_queues={})
    with running(shop.app):
        shop.charge.delay(-1)
        with pytest.raises(AssertionError, match="no such order"):
            dead_letters.assert_none()


def test_messages_that_celery_drops_are_letters_too(
    shop: SimpleNamespace, dead_letters: WatchedLetters, running: Any
) -> None:
    """An unknown task and an expired one never run."""
    dead_letters.watch(shop.app)
    shop.charge.apply_async((1,), expires=-1)
    with running(shop.app):
        unknown = shop.app.send_task("shop.nobody_knows")
        dead_letters.assert_dead_lettered(unknown, reason="unknown_task")
        dead_letters.assert_dead_lettered("shop.charge", reason="expired")
    assert shop.ran == []


def test_a_letter_is_redriven_within_a_test(
    shop: SimpleNamespace, dead_letters: WatchedLetters, running: Any
) -> None:
    """`watch` gives the operator's API of the app."""
    dlq = dead_letters.watch(shop.app)
    with running(shop.app):
        shop.charge.delay(-1)
        dead_letters.assert_dead_lettered(shop.charge, redrives=0)
        dlq.redrive(shop.letters)
        dead_letters.assert_dead_lettered(shop.charge, redrives=1)


def test_a_worker_that_ran_before_is_watched_if_it_keeps_letters_in_the_embedded_redis(
    shop: SimpleNamespace, running: Any
) -> None:
    """A worker for the whole session; each test sees its own letters only."""
    shop.app.conf.update(fresh_conf())
    with running(shop.app):
        shop.fails.delay()
        poll(shop.dlq.queues, timeout_seconds=5)
        for _ in range(2):
            with closing(WatchedLetters()) as watched:
                watched.watch(shop.app)
                shop.charge.delay(-1)
                watched.assert_dead_lettered()
    assert [letter.task_name for letter in shop.dlq.letters(shop.letters)] == ["shop.fails"]


# -- several apps, several tests ----------------------------------------------------------


def test_several_apps_are_watched_together(dead_letters: WatchedLetters) -> None:
    """Each keeps its own letters; the assertions look at all."""
    one, two = a_shop(), a_shop()
    first = dead_letters.watch(one.app, **EAGER)
    second = dead_letters.watch(two.app, **EAGER)
    one.charge.delay(-1)
    two.fails.delay()
    assert [x.task_name for x in dead_letters.letters()] == ["shop.charge", "shop.fails"]
    assert [x.task_name for x in first.letters(one.letters)] == ["shop.charge"]
    assert [x.task_name for x in second.letters(two.letters)] == ["shop.fails"]


def test_an_app_that_is_not_watched_is_left_alone(
    shop: SimpleNamespace, dead_letters: WatchedLetters
) -> None:
    """Its eager tasks run as ever."""
    other = a_shop()
    dead_letters.watch(shop.app, **EAGER)
    assert other.fails.apply().failed()
    assert dead_letters.letters() == []


def test_the_app_is_afterwards_as_it_was(shop: SimpleNamespace) -> None:
    """Settings, store, publishing and Celery's own classes."""
    shop.app.conf.task_eager_propagates = True

    def state() -> list[Any]:
        app = shop.app
        publish = (app.send_task, app.amqp.send_task_message)
        return [dict(app.conf.changes), publish, dict(vars(shop.dlq.assembly)), Task.apply]

    before = state()
    for _ in range(2):
        with closing(WatchedLetters()) as watched:
            watched.watch(shop.app, task_always_eager=True, task_eager_propagates=False)
            shop.charge.delay(-1)
            watched.assert_dead_lettered(shop.charge)
        assert state() == before


def test_an_unfinished_module_is_watched_through_proxies(
    dead_letters: WatchedLetters, current: None
) -> None:
    """The current app, and a shared task that Celery has not made yet."""
    app = Celery("proxied", broker="memory://")
    app.conf.update(dlq_queues={"*": {}}, dlq_url="redis://127.0.0.1:1/0")
    DeadLetters(app)

    @shared_task(name=f"shared-{uuid4().hex}")
    def shared() -> None:
        raise LookupError("no price")

    app.set_current()
    dead_letters.watch(current_app, **EAGER)
    shared.delay()
    dead_letters.assert_dead_lettered(shared)


def test_a_redrive_in_a_test_leaves_no_job(shop: SimpleNamespace) -> None:
    """Jobs and the audit are the test's own, as letters are."""
    before = shop.dlq.assembly.backend
    with closing(WatchedLetters()) as watched:
        dlq = watched.watch(shop.app, task_always_eager=True, task_eager_propagates=False)
        shop.charge.delay(-1)
        dlq.discard(shop.letters)
        assert [job.kind for job in dlq.jobs()] == ["discard"]
        assert len(dlq.changes()) == 1
    assert shop.dlq.assembly.backend is before


# -- what a failed assertion says ---------------------------------------------------------


def test_a_failed_assertion_shows_what_was_expected_and_what_there_is(
    shop: SimpleNamespace, dead_letters: WatchedLetters
) -> None:
    """Reason, task, queue and description of each letter; those that fit are marked."""
    dead_letters.watch(shop.app, **EAGER)
    first, second = shop.fails.delay("one"), shop.fails.delay("two")
    shop.charge.delay(-1)

    with pytest.raises(AssertionError) as none:
        dead_letters.assert_dead_lettered(shop.charge, reason="failed")
    with pytest.raises(AssertionError) as two:
        dead_letters.assert_dead_lettered(shop.fails)
    with pytest.raises(AssertionError) as some:
        dead_letters.assert_none(first)

    assert str(none.value).splitlines()[:2] == [
        "expected one letter of shop.charge with reason 'failed', got none of the 3 letters fit",
        f"    failed: shop.fails[{first.id}] in {shop.letters}: one",
    ]
    assert f"  * failed: shop.fails[{second.id}] in {shop.letters}: two" in str(two.value)
    assert "got 2 of the 3 letters fit" in str(two.value)
    assert str(some.value).startswith(f"expected no letter of the task {first.id}, got 1 of the 3")


def test_a_count_that_is_not_reached_says_so(
    shop: SimpleNamespace, dead_letters: WatchedLetters
) -> None:
    """After the time that was given."""
    dead_letters.watch(shop.app, **EAGER)
    with pytest.raises(AssertionError, match="expected 2 letters with reason 'failed', got no"):
        dead_letters.letters(count=2, reason=Reason.FAILED, timeout_seconds=0.05)


def test_misuse_is_not_a_failed_assertion(
    shop: SimpleNamespace, dead_letters: WatchedLetters
) -> None:
    """A test that can never pass for the right reason says why."""
    bare = Celery("bare", broker="memory://", set_as_current=False)
    with pytest.raises(DLQError, match=r"call dead_letters\.watch"):
        dead_letters.assert_none()
    with pytest.raises(DLQError, match=r"DeadLetters\(app\) where the app is made"):
        dead_letters.watch(bare)
    dead_letters.watch(shop.app)
    with pytest.raises(DLQError, match="first watch"):
        dead_letters.watch(shop.app, **EAGER)
    with pytest.raises(DLQError, match="expected reason to be one of"):
        dead_letters.assert_none(reason="because")
    with pytest.raises(TypeError, match="did you mean 'deliveries'"):
        dead_letters.assert_none(delivery=3)
    with pytest.raises(TypeError, match="a task, its name or a result"):
        dead_letters.assert_none(17)
    assert dead_letters.watch(shop.app) is shop.dlq


def test_wrong_settings_are_refused_and_undone(shop: SimpleNamespace) -> None:
    """At once, not at the first message."""
    before = dict(shop.app.conf.changes)
    with closing(WatchedLetters()) as watched, pytest.raises(SettingsError, match="did you mean"):
        watched.watch(shop.app, dlq_queue={})
    assert dict(shop.app.conf.changes) == before


# -- as a plugin --------------------------------------------------------------------------


def test_loading_the_plugin_imports_neither_celery_nor_redis() -> None:
    """Every pytest run on the machine pays for it."""
    code = (
        "import sys, celery_dlq.testing.plugin; roots = {n.partition('.')[0] for n in sys.modules};"
        "print(sorted(roots & {'celery', 'kombu', 'billiard', 'redis', 'click'}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, encoding="utf-8"
    )
    assert done.stdout.strip() == "[]"


def test_a_user_s_test_fails_with_the_letters_in_its_report(pytester: pytest.Pytester) -> None:
    """The report points at the user's line, not into the fixture."""
    pytester.makeconftest("from celery_dlq.testing.plugin import dead_letters")
    pytester.makepyfile(
        """
        from celery import Celery
        from celery_dlq import DeadLetters, RejectToDLQ

        app = Celery("shop", broker="memory://", set_as_current=False)
        app.conf.update(dlq_url="redis://127.0.0.1:1/0", dlq_queues={"*": {"max_deliveries": 3}})
        dlq = DeadLetters(app)

        @app.task
        def charge(order_id):
            raise RejectToDLQ("no such order")

        def test_passes(dead_letters):
            dead_letters.watch(app, task_always_eager=True)
            charge.delay(-1)
            dead_letters.assert_dead_lettered(charge, reason="rejected")

        def test_fails(dead_letters):
            dead_letters.watch(app, task_always_eager=True)
            charge.delay(-1)
            dead_letters.assert_none()

        def test_starts_with_no_letters(dead_letters):
            dead_letters.watch(app, task_always_eager=True)
            dead_letters.assert_none()
        """
    )
    result = pytester.runpytest_subprocess("-p", "no:randomly", "-p", "no:cacheprovider")
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(
        [
            "*AssertionError: expected no letter, got 1 of the 1 letters fit",
            "E*rejected: *charge* in celery-DLQ: no such order",
        ]
    )
    result.stdout.no_fnmatch_line("*watched.py*")
