"""Examines an app: its settings first, then its servers, all of them at the same time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING

from redis.exceptions import AuthenticationError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from celery_dlq.errors import DLQError, SettingsError, StoreUnavailable
from celery_dlq.features.doctor import server_checks, settings_checks
from celery_dlq.features.doctor.finding import STORE, Finding, Guarantee, finding
from celery_dlq.features.doctor.settings_checks import ExaminedApp
from celery_dlq.letters.printable import error_without_secrets
from celery_dlq.operations.policies import PolicyAdmin
from celery_dlq.transport.redis.broker import mismatch

if TYPE_CHECKING:
    from celery_dlq.assembly import Assembly

_SECONDS = 7.0
"""The longest that servers are waited for."""

_CONNECT_SECONDS = 3.0
_WORKERS = "workers"  # who answer in time, or are not known: no finding


class Examination:
    """Looks for what endangers messages and letters; changes nothing."""

    def __init__(self, assembly: Assembly) -> None:
        self._dlq = assembly
        self.answered = False
        """True once a worker has answered remote control: others without celery_dlq are seen."""

    def findings(self) -> list[Finding]:
        """What endangers messages or letters in this app, in at most ten seconds.

        Looks at the settings and tasks of the app, at its Redis, its broker and its result
        backend, and at the workers, holds and jobs. Wrong settings are the only finding.

        Returns:
            The findings; an empty list if nothing is wrong.
        """
        try:
            self._dlq.validate()
        except SettingsError as exc:
            return [finding("settings", str(exc))]
        case = ExaminedApp(self._dlq)
        servers: dict[str, Callable[[], list[Finding]]] = {
            "store": partial(self._examine_store, case),
            "broker": partial(self._examine_broker, case),
            "result-backend": self._results,
            _WORKERS: self._workers,
        }
        answers = _answers(servers)
        found = [finding for check in settings_checks.CHECKS for finding in check(case)]
        return found + answers

    def guarantees(self, found: Sequence[Finding] | None = None) -> list[Guarantee]:
        """What is guaranteed to the guarded tasks of this app, each by the policy of its messages.

        Args:
            found: What `doctor` found. Without it, no server is asked: overrides, limits of the
                broker's own, policies of live workers, and workers without celery_dlq are not
                known.

        Returns:
            A row for those tasks for which all answers are the same.

        Raises:
            SettingsError: A setting or policy is wrong.
        """
        self._dlq.validate()
        case = ExaminedApp(self._dlq)
        if found is not None and all(one.check not in STORE[:2] for one in found):
            with suppress(StoreUnavailable):
                case.table = PolicyAdmin(self._dlq).in_force()
                case.registered = self._dlq.backend.workers.workers(with_tasks=False)
        return settings_checks.guarantees(case, found or ())

    def _examine_store(self, case: ExaminedApp) -> list[Finding]:
        found: list[Finding] = []
        with self._dlq.separate() as own:
            try:
                own.backend.check(own.dead_letter_queues())
            except DLQError as exc:
                found.append(_away_finding("store", exc))
                if found[0].check != "store-refuses":
                    return found
            with suppress(StoreUnavailable) if found else nullcontext():  # a user who may read
                case.table = PolicyAdmin(own).in_force()
                here = ExaminedApp(own)
                here.table = case.table
                for check in server_checks.CHECKS:
                    found += check(here)
        return found

    def _examine_broker(self, case: ExaminedApp) -> list[Finding]:
        why = mismatch(case.transport)
        if why is not None:
            return [finding("redis-py", f"{why}.")]
        connection = self._dlq.app.connection_for_read(connect_timeout=_CONNECT_SECONDS)
        with connection:
            connection.connect()
            return list(server_checks.broker_findings(case, connection.default_channel))

    def _workers(self) -> list[Finding]:
        """Who takes messages of guarded queues; nothing of a broker or store that does not tell."""
        connection = self._dlq.app.connection_for_write(connect_timeout=_CONNECT_SECONDS)
        with suppress(Exception), connection, self._dlq.separate() as own:
            answers = server_checks.answers(own.app, connection)
            self.answered = bool(answers)
            return list(server_checks.plain_workers(ExaminedApp(own), answers))
        return []

    def _results(self) -> list[Finding]:
        server_checks.ask_for_result(self._dlq.app)
        return []


def _answers(asked: Mapping[str, Callable[[], list[Finding]]]) -> list[Finding]:
    """Ask servers at the same time; one that fails, or is silent for too long, is a finding."""
    answers: dict[str, list[Finding]] = {}

    def ask(name: str) -> None:
        try:
            answers[name] = asked[name]()
        except Exception as exc:  # noqa: BLE001 - whatever a driver raises is a finding
            answers[name] = [_away_finding(name, exc)]

    threads = [threading.Thread(target=ask, args=(name,), daemon=True) for name in asked]
    deadline = time.monotonic() + _SECONDS
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    silent = TimeoutError(f"no answer within {_SECONDS:g} s")
    for name in asked.keys() - answers.keys() - {_WORKERS}:
        answers[name] = [_away_finding(name, silent)]
    return [one for name in asked for one in answers.get(name, [])]


def _away_finding(name: str, exc: Exception) -> Finding:
    what = name.replace("-", " ")
    why = str(exc) if isinstance(exc, DLQError) else error_without_secrets(exc)
    kind = _of_store(exc) if name == "store" else name
    return finding(kind, f"The {what} cannot be used: {why.rstrip('.')}.")


def _of_store(exc: Exception) -> str:
    """The kind of finding of a store that was away, was slow, or refused what was asked."""
    causes: list[BaseException] = [exc]
    while (cause := causes[-1].__cause__) is not None:
        causes.append(cause)
    if any(isinstance(one, (SettingsError, ResponseError, AuthenticationError)) for one in causes):
        return "store-refuses"
    late = (one for one in causes if isinstance(one, (TimeoutError, RedisTimeoutError)))
    return "store-slow" if any("connecting" not in str(one) for one in late) else "store"
