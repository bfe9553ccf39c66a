"""A Celery worker as a contestant, and a driver that publishes without the plugin."""

from __future__ import annotations

import json
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import redis
from benchmarks.contest import Contestant, python
from benchmarks.processes import Tree
from celery import Celery
from celery.utils import uuid
from kombu import Queue

HERE = Path(__file__).parent.parent
CONCURRENCY = {"prefork": 2, "threads": 8, "gevent": 50, "solo": 1}


class CeleryContestant(Contestant):
    """A worker on a queue of its own.

    Args:
        name: What tables call it, and its variant, see `benchmarks.node`.
        folder: For its tally and log.
        server: The server's processes.
        broker: URL of the broker.
        task: Name of the task it does.
        args: The task's arguments.
        letters: URL of the Redis where letters are.
        pool: Celery's name of the pool.
        variant: If it is not the name.
        conf: More settings of the worker.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        server: Tree,
        *,
        broker: str,
        task: str,
        args: tuple[Any, ...] = (),
        letters: str | None = None,
        pool: str = "prefork",
        variant: str | None = None,
        conf: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(name, folder, server)
        self.queue = f"bench-{''.join(c for c in name if c.isalnum())}"
        self.letters = letters or broker
        self._task, self._args = task, args
        self._options = {
            "variant": variant or name,
            "queue": self.queue,
            "broker": broker,
            "letters": self.letters,
            "pool": pool,
            "concurrency": CONCURRENCY[pool],
            "tally": str(self.tally),
            "log": str(self.log),
            "conf": {"dlq_spool_dir": str(folder / "spool"), **(conf or {})},
        }
        if self._options["variant"].startswith("plain"):
            del self._options["conf"]["dlq_spool_dir"]
        self._app = Celery("driver", broker=broker, set_as_current=False)
        self._queue = Queue(self.queue)

    def command(self) -> tuple[list[str], dict[str, str]]:
        """A worker in a process of its own."""
        path = os.pathsep.join(map(str, (HERE, HERE.parent, HERE.parents[1])))
        return python("benchmarks.node", json.dumps(self._options)), {
            **os.environ,
            "PYTHONPATH": path,
        }

    def publish(self, messages: int) -> None:
        """The messages of ``apply_async``; each with an id of its own."""
        headers, properties, body, _ = self._app.amqp.as_task_v2(uuid(), self._task, self._args)
        with self._app.connection_for_write() as connection:
            producer = connection.Producer(serializer="json")
            self._queue(connection.default_channel).declare()
            batch = producer.batch() if hasattr(producer, "batch") else nullcontext()
            with batch:
                for _ in range(messages):
                    task_id = uuid()
                    producer.publish(
                        body,
                        headers={**headers, "id": task_id, "root_id": task_id},
                        routing_key=self.queue,
                        delivery_mode=2,
                        **{**properties, "correlation_id": task_id},
                    )

    def dead_letter_to(self, queue: str) -> None:
        """Have RabbitMQ itself keep what is rejected, in another queue."""
        arguments = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": queue}
        self._options["queue_options"] = {"queue_arguments": arguments}
        self._queue = Queue(self.queue, queue_arguments=arguments)

    def stored_letters(self) -> int:
        """Letters in its dead-letter queue."""
        with redis.Redis.from_url(self.letters) as client:
            return int(client.xlen(f"dlq:{{{self.queue}-DLQ}}:letters"))

    def close(self) -> None:
        """End its worker and the driver's app."""
        super().close()
        self._app.close()
