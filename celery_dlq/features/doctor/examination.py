"""Examines an app: its settings first, then its servers, all of them at the same time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from celery_dlq.errors import SettingsError
from celery_dlq.features.doctor import server_checks, settings_checks
from celery_dlq.features.doctor.finding import Finding, Guarantee, finding
from celery_dlq.features.doctor.settings_checks import Case
from celery_dlq.letters.printable import error_without_secrets
from celery_dlq.transport.redis.broker import mismatch

if TYPE_CHECKING:
    from celery_dlq.assembly import Assembly

_SECONDS = 7.0
"""The longest that servers are waited for."""

_CONNECT_SECONDS = 3.0


class Examination:
    """Looks for what endangers messages and letters; changes nothing."""

    def __init__(self, assembly: Assembly) -> None:
        self._dlq = assembly

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
        case = Case(self._dlq)
        found = [finding for check in settings_checks.CHECKS for finding in check(case)]
        servers = {"store": self._store, "broker": self._broker, "result-backend": self._results}
        return found + _answers(servers)

    def guarantees(self) -> list[Guarantee]:
        """What is guaranteed to the guarded tasks of this app, by how they acknowledge.

        Returns:
            A row for each way of acknowledging that its tasks have.

        Raises:
            SettingsError: A setting or policy is wrong.
        """
        self._dlq.validate()
        return settings_checks.guarantees(Case(self._dlq))

    def _store(self) -> list[Finding]:
        with self._dlq.separate() as own:
            own.backend.check(own.dead_letter_queues())
            case = Case(own)
            return [finding for check in server_checks.CHECKS for finding in check(case)]

    def _broker(self) -> list[Finding]:
        why = mismatch(Case(self._dlq).transport)
        if why is not None:
            return [finding("redis-py", f"{why}.")]
        connection = self._dlq.app.connection_for_read(connect_timeout=_CONNECT_SECONDS)
        with connection:
            connection.connect()
            return list(server_checks.broker(Case(self._dlq), connection.default_channel))

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
            answers[name] = [_away(name, error_without_secrets(exc))]

    threads = [threading.Thread(target=ask, args=(name,), daemon=True) for name in asked]
    deadline = time.monotonic() + _SECONDS
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    silent = f"no answer within {_SECONDS:g} s"
    every = [answers.get(name, [_away(name, silent)]) for name in asked]
    return [finding for found in every for finding in found]


def _away(name: str, why: str) -> Finding:
    what = name.replace("-", " ")
    return finding(name, f"The {what} cannot be used: {why.rstrip('.')}.")
