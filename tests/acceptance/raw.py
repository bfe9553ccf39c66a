"""Messages that no Celery writes: any bytes with any headers."""

from __future__ import annotations

from typing import Any

from kombu import Connection


def publish(broker: str, body: Any, **more: Any) -> None:
    """Put any bytes with any headers on the queue."""
    with Connection(broker) as connection:
        producer = connection.Producer()
        producer.publish(body, exchange="", routing_key="orders", **more)


def headers(task: str, task_id: str, **more: Any) -> dict[str, Any]:
    return {"task": task, "id": task_id, "lang": "py", "retries": 0, **more}


JSON = {"content_type": "application/json", "content_encoding": "utf-8"}
BODY = b'[["x"], {}, {"callbacks": null, "errbacks": null, "chain": null, "chord": null}]'
