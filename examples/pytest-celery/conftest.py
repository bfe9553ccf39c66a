"""What pytest-celery needs to test an app with dead letters."""

import os
import time

import pytest
from pytest_celery import CeleryTestSetup

from celery_dlq import DeadLetters

if os.environ.get("NODES") == "containers":
    from containers import *  # noqa: F403 - its fixtures
else:
    from processes import *  # noqa: F403 - its fixtures


class ShopSetup(CeleryTestSetup):
    """The test's side: its app publishes to the workers, and reads their dead letters."""

    @classmethod
    def update_app_config(cls, app):
        app.conf.update(task_default_queue="orders", dlq_url=app.conf.broker_url)
        DeadLetters(app)

    @property
    def dlq(self):
        return DeadLetters.of(self.app)

    def letter(self, result, timeout=30):
        """Wait for the letter of a task."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            for queue in self.dlq.queues():
                for letter in self.dlq.letters(queue.name):
                    if letter.task_id == result.id:
                        return letter
            time.sleep(0.1)
        raise AssertionError(f"expected a letter of {result.id}, got none; {self.worker.logs()}")

    def teardown(self):
        self.dlq.close()
        self.app.close()
        super().teardown()


@pytest.fixture
def celery_setup_cls():
    return ShopSetup
