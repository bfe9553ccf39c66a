"""Tasks that are coroutines, for a pool that runs them."""

from __future__ import annotations

import asyncio
from typing import Any

from celery.exceptions import Reject
from poison_app import app, trace

from celery_dlq import RejectToDLQ


@app.task(name="poison_app.healthy_async")
async def healthy(key: str) -> str:
    await _traced(key)
    return key


@app.task(name="poison_app.fails_async")
async def fails(key: str) -> None:
    await _traced(key)
    raise LookupError("no price")


@app.task(name="poison_app.rejects_async")
async def rejects(key: str) -> None:
    await _traced(key)
    raise RejectToDLQ("no such order")


@app.task(name="poison_app.requeues_async")
async def requeues(key: str) -> None:
    await _traced(key)
    raise Reject("not now", requeue=True)


@app.task(name="poison_app.retries_async", bind=True, max_retries=1, default_retry_delay=0)
async def retries(self: Any, key: str) -> None:
    await _traced(key)
    raise self.retry()


async def _traced(key: str) -> None:
    await asyncio.sleep(0)
    trace("ran", key)
