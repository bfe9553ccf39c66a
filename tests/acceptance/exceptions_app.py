"""The app of the tests with tasks whose exceptions a policy names."""

from __future__ import annotations

import json
from typing import Any

from celery import chain
from celery.exceptions import SoftTimeLimitExceeded
from poison_app import app, dlq, trace

__all__ = ["app", "dlq"]


class FatalError(Exception):
    """Cannot leave its process: unpickling would call it with one argument."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


class WorseError(FatalError):
    """Only its base class has a rule."""


class KnownError(Exception):
    """Expected."""


class StubbornError(Exception):
    """Is retried until nothing is left."""


@app.task(bind=True)
def recovers(self: Any, key: str) -> str:
    """Fail twice; the rule names the exception as `json` does, which does not define it."""
    trace("ran", key)
    if self.request.retries < 2:
        json.loads("{")
    return key


@app.task
def after(value: str, key: str) -> None:
    trace("ran", f"{key} {value}")


class OwnTask(app.Task):  # type: ignore[misc, name-defined]
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs)


@app.task(base=OwnTask)
def stubborn(key: str) -> None:
    trace("ran", key)
    raise StubbornError("no partner")


@app.task(acks_late=False)
def stubborn_early(key: str) -> None:
    trace("ran", key)
    raise StubbornError("no partner")


@app.task
def worse(key: str) -> None:
    trace("ran", key)
    raise WorseError(7, "cannot be")


@app.task(autoretry_for=(Exception,), max_retries=3, default_retry_delay=0)
def worse_autoretried(key: str) -> None:
    trace("ran", key)
    raise WorseError(7, "cannot be")


@app.task(autoretry_for=(Exception,), max_retries=1, default_retry_delay=0)
def autoretried(key: str) -> None:
    trace("ran", key)
    raise LookupError("nobody named me")


@app.task(throws=(FatalError,), acks_on_failure_or_timeout=False)
def thrown(key: str) -> None:
    trace("ran", key)
    raise FatalError(7, "cannot be")


@app.task(autoretry_for=(Exception,), max_retries=3, default_retry_delay=0)
def known(key: str) -> None:
    trace("ran", key)
    raise KnownError(key)


@app.task(bind=True, max_retries=1, default_retry_delay=0)
def gives_up(self: Any, key: str) -> None:
    """Its own retries are spent first; the rule must not add more."""
    trace("ran", key)
    try:
        raise StubbornError("no partner")
    except StubbornError as exc:
        raise self.retry(exc=exc) from exc


@app.task(soft_time_limit=1)
def slow(key: str) -> None:
    trace("ran", key)
    raise SoftTimeLimitExceeded


@app.task
def runs_chain(key: str) -> None:
    trace("ran", "runs_chain")
    chain(recovers.s(key), after.s(key)).delay()
