"""`WatchedLetters`, the value of the fixture ``dead_letters``."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch
from uuid import uuid4

from celery.result import AsyncResult

from celery_dlq.assembly import backend_for
from celery_dlq.config import Settings
from celery_dlq.errors import DLQError
from celery_dlq.letters.filters import LetterFilter
from celery_dlq.letters.record import DeadLetter, Reason, field_kinds
from celery_dlq.plugin import ATTRIBUTE, DeadLetters, app_itself
from celery_dlq.policies.checks import suggestion
from celery_dlq.store.embedded import embedded
from celery_dlq.store.letters import Letters
from celery_dlq.testing.eager import EagerGuards
from celery_dlq.testing.ledger import Ledger

TIMEOUT_SECONDS = 5.0
_PAUSE_SECONDS = 0.01
_MAX_SHOWN = 20


class WatchedLetters:
    """The dead letters of Celery apps under test, kept in a Redis of the tests' own.

    Supports both ways to test Celery:

    - Eager (``task_always_eager`` or ``task.apply()``): the letters are stored before
      the call returns. `celery_dlq.testing.eager` lists what eager mode cannot show.
    - An embedded worker (``celery.contrib.testing.worker.start_worker``, or Celery's
      fixture ``celery_worker``) on the broker ``memory://`` with the pool ``solo`` or
      ``threads``: assertions wait for the worker.

    Example:
        A worker in a thread of this process::

            def test_a_poison_order_is_dead_lettered(dead_letters):
                dead_letters.watch(app)
                with start_worker(app, perform_ping_check=False):
                    result = charge.delay(-1)
                    letter = dead_letters.assert_dead_lettered(
                        result, reason="rejected", description="no such order"
                    )
                assert letter.deliveries == 1
    """

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._watched: dict[int, _Watched] = {}
        self._eager = EagerGuards()
        self._ledger = Ledger()
        self._eager.guard_until_closed(self._stack)
        self._ledger.watch_signals(self._stack)
        self._ledger.watch_stores(self._stack)

    def close(self) -> None:
        """Restore all watched apps."""
        self._stack.close()
        self._watched.clear()

    def watch(self, app: Any, **settings: Any) -> DeadLetters:
        """Keep the dead letters of an app in a Redis of the tests' own until the test ends.

        Watch an app before its worker starts. A worker may run already
        (``celery_session_worker``) only if the app's ``dlq_url`` is
        `celery_dlq.testing.embedded`.

        Args:
            app: The Celery app. It must have its `DeadLetters`, as in production.
            **settings: Settings for this test, which override those of the app, e.g.
                ``task_always_eager=True`` or ``dlq_queues={"*": {"max_deliveries": 3}}``.

        Returns:
            The app's `DeadLetters`, e.g. to redrive.

        Raises:
            DLQError: The app has no `DeadLetters`, or is watched a second time with settings.
            SettingsError: A ``dlq_`` setting is unknown or has an unusable value.
        """
        app = app_itself(app)
        known = self._watched.get(id(app))
        if known is not None:
            if settings:
                raise DLQError(
                    f"expected settings for {app.main!r} in the first watch() only, got "
                    f"{settings} in another"
                )
            return known.dlq
        dlq = _installed(app)
        store = {"dlq_url": embedded(), "dlq_use_ssl": None, "dlq_transport_options": None}
        # A running worker may use the store already: keep it.
        if app.conf.get("dlq_url") != embedded():
            store["dlq_key_prefix"] = f"test-{uuid4().hex}"
        with ExitStack() as stack:
            stack.enter_context(patch.dict(app.conf.changes, {**settings, **store}))
            backend = backend_for(Settings.from_conf(app.conf), app)
            stack.callback(backend.close)
            stack.enter_context(dlq.assembly.using(backend))
            self._stack.push(stack.pop_all())
        self._ledger.watch_publishing(app, self._stack)
        self._eager.guard_app(app, dlq)
        watched = self._watched[id(app)] = _Watched(app, dlq, backend.letters)
        self._stack.callback(watched.forget_new)
        return dlq

    def letters(
        self,
        task: Any = None,
        *,
        count: int | None = None,
        timeout_seconds: float | None = None,
        reason: Reason | str | None = None,
        description: str | re.Pattern[str] | None = None,
        **fields: Any,
    ) -> list[DeadLetter]:
        """The letters of this test that match, oldest first.

        Args:
            task: A task, its name, or a result; ``None`` for all.
            count: Wait until this many match. ``None`` returns the present ones at once.
            timeout_seconds: Seconds to wait at most. Defaults to 5, or to 0 if all
                executions were eager.
            reason: A `Reason` or its name.
            description: Text in the letter's description, or a compiled pattern to
                search there.
            **fields: Values of other fields of the letter, e.g. ``retries=2``.

        Raises:
            AssertionError: Fewer match in time, or more do.
        """
        __tracebackhide__ = True
        wanted = self._wanted(task, reason, description, fields)
        if count is None:
            return self._fitting(wanted)
        return self._exactly(count, wanted, timeout_seconds)

    def assert_dead_lettered(
        self,
        task: Any = None,
        *,
        timeout_seconds: float | None = None,
        reason: Reason | str | None = None,
        description: str | re.Pattern[str] | None = None,
        **fields: Any,
    ) -> DeadLetter:
        """Assert that exactly one letter matches.

        Args:
            task: A task, its name, or a result; ``None`` for all. Pass the result if
                the task was sent more than once.
            timeout_seconds: Seconds to wait at most. Defaults to 5, or to 0 if all
                executions were eager.
            reason: A `Reason` or its name.
            description: Text in the letter's description, or a compiled pattern to
                search there.
            **fields: Values of other fields of the letter, e.g. ``deliveries=3``.

        Returns:
            The letter.

        Raises:
            AssertionError: No letter matches in time, or several do.
        """
        __tracebackhide__ = True
        wanted = self._wanted(task, reason, description, fields)
        return self._exactly(1, wanted, timeout_seconds)[0]

    def assert_none(
        self,
        task: Any = None,
        *,
        timeout_seconds: float | None = None,
        reason: Reason | str | None = None,
        description: str | re.Pattern[str] | None = None,
        **fields: Any,
    ) -> None:
        """Assert that no letter matches and that every published message is finished.

        Args:
            task: A task, its name, or a result; ``None`` for all.
            timeout_seconds: Seconds to wait at most for unfinished messages. Defaults to 5.
            reason: A `Reason` or its name.
            description: Text in the letter's description, or a compiled pattern to
                search there.
            **fields: Values of other fields of the letter.

        Raises:
            AssertionError: A letter matches, or a message is not finished.
        """
        __tracebackhide__ = True
        wanted = self._wanted(task, reason, description, fields)
        self._wait_until(
            lambda: self._fitting(wanted) or not self._ledger.under_way(), timeout_seconds
        )
        # In this order: a letter comes before its message leaves the ledger.
        under_way = self._ledger.under_way()
        found = self._fitting(wanted)
        if found or under_way:
            raise AssertionError(self._failure_text(f"expected no letter{wanted}", found))

    def _wanted(
        self,
        task: Any,
        reason: Reason | str | None,
        description: str | re.Pattern[str] | None,
        fields: dict[str, Any],
    ) -> _Wanted:
        if not self._watched:
            raise DLQError("expected a watched app, got none; call dead_letters.watch(app) first")
        unknown = [name for name in fields if name not in field_kinds()]
        if unknown:
            hint = suggestion(unknown[0], field_kinds())
            raise TypeError(f"expected fields of a letter, got {unknown[0]!r}; {hint}")
        name, task_id = _task_and_id(task)
        where = LetterFilter(task_name=name, reason=reason)
        return _Wanted(where, task_id, description, fields)

    def _exactly(
        self, count: int, wanted: _Wanted, timeout_seconds: float | None
    ) -> list[DeadLetter]:
        __tracebackhide__ = True
        self._wait_until(lambda: len(self._fitting(wanted)) >= count, timeout_seconds)
        found = self._fitting(wanted)
        if len(found) != count:
            number = "one letter" if count == 1 else f"{count} letters"
            raise AssertionError(self._failure_text(f"expected {number}{wanted}", found))
        return found

    def _wait_until(self, until: Callable[[], object], timeout_seconds: float | None) -> None:
        eager_only = self._eager.used and not self._ledger.used
        default = 0.0 if eager_only else TIMEOUT_SECONDS
        deadline = time.monotonic() + (default if timeout_seconds is None else timeout_seconds)
        while not until() and time.monotonic() < deadline:
            time.sleep(_PAUSE_SECONDS)
        if self._eager.problems:
            raise DLQError(
                "the guard of an eager execution failed; see the error above"
            ) from self._eager.problems[0]

    def _all_letters(self) -> list[DeadLetter]:
        found = [letter for watched in self._watched.values() for letter in watched.new_letters()]
        return sorted(found, key=lambda letter: letter.dead_lettered_at)

    def _fitting(self, wanted: _Wanted) -> list[DeadLetter]:
        return [letter for letter in self._all_letters() if wanted.matches(letter)]

    def _failure_text(self, expected: str, found: list[DeadLetter]) -> str:
        """The text of a failed assertion: the expectation, then the letters of this test."""
        present, under_way = self._all_letters(), self._ledger.under_way()
        fit = f"{len(found) or 'none'} of the {len(present)} letters fit"
        got = fit if present else "no letter"
        lines = [f"{expected}, got {got}"]
        lines += (
            f"  {'*' if letter in found else ' '} {letter.reason}: {letter.task_name}"
            f"[{letter.task_id}] in {letter.dead_letter_queue}: {letter.description}"
            for letter in present[:_MAX_SHOWN]
        )
        if len(present) > _MAX_SHOWN:
            lines.append(f"    … and {len(present) - _MAX_SHOWN} more")
        if under_way:
            lines.append(f"  still under way: {', '.join(under_way[:_MAX_SHOWN])}")
        return "\n".join(lines)


@dataclass(slots=True)
class _Watched:
    """One app, and the letters it had before the test."""

    app: Any
    dlq: DeadLetters
    store: Letters
    _before: set[tuple[str, str]] = field(init=False)

    def __post_init__(self) -> None:
        self._before = set()
        self._before = {(letter.dead_letter_queue, letter.id) for letter in self.new_letters()}

    def new_letters(self) -> list[DeadLetter]:
        """The letters stored since then."""
        return [
            stored.letter
            for name in self.store.names()
            for stored in self.store.letters(name, newest_first=False)
            if (name, stored.letter.id) not in self._before
        ]

    def forget_new(self) -> None:
        """Restore the store."""
        for letter in self.new_letters():
            self.store.remove(letter.dead_letter_queue, [letter.id])


@dataclass(frozen=True, slots=True)
class _Wanted:
    """The letters that a test expects."""

    where: LetterFilter
    task_id: str | None
    description: str | re.Pattern[str] | None
    fields: dict[str, Any]

    def matches(self, letter: DeadLetter) -> bool:
        return (
            self.where.matches(letter)
            and (self.task_id is None or letter.task_id == self.task_id)
            and self._describes(letter)
            and all(getattr(letter, name) == value for name, value in self.fields.items())
        )

    def _describes(self, letter: DeadLetter) -> bool:
        if isinstance(self.description, re.Pattern):
            return bool(self.description.search(letter.description))
        return self.description is None or self.description in letter.description

    def __str__(self) -> str:
        """The words for an error text, e.g. `` of shop.charge with reason 'rejected'``."""
        subject = self.where.task_name or (f"the task {self.task_id}" if self.task_id else "")
        given: dict[str, Any] = {"reason": self.where.reason, "description": self.description}
        given = {name: value for name, value in given.items() if value is not None}
        values = [
            f"{name} {_shown_value(value)}" for name, value in {**given, **self.fields}.items()
        ]
        return (f" of {subject}" if subject else "") + (
            f" with {' and '.join(values)}" if values else ""
        )


def _shown_value(value: Any) -> str:
    return repr(value.value if isinstance(value, Reason) else value)


def _task_and_id(task: Any) -> tuple[str | None, str | None]:
    """The task name and task id from a test's ``task`` argument."""
    if task is None or isinstance(task, str):
        return task, None
    if isinstance(task, AsyncResult):
        return None, str(task.id)
    name = getattr(task, "name", None)
    if isinstance(name, str):
        return name, None
    raise TypeError(f"expected a task, its name or a result, got {task!r}")


def _installed(app: Any) -> DeadLetters:
    found = getattr(app, ATTRIBUTE, None)  # `DeadLetters.of` would make one
    if not isinstance(found, DeadLetters):
        raise DLQError(
            f"expected the app {app.main!r} to have its DeadLetters, got none; write "
            f"DeadLetters(app) where the app is made, or production keeps no letters either"
        )
    return found
