"""Tests of Celery's that must fail with the plugin on every app, each with the reason why.

An entry that does not fail only with the plugin any more is a fault, too.
"""

from __future__ import annotations

_MOCK = (
    "the consumer's worker is a mock, and so is the guard that the plugin's step finds there: it "
    "says of each message what a mock says, and neither dead-letters it nor leaves it to Celery"
)

REASONS = {
    **{
        f"t/unit/worker/test_worker.py::test_Consumer::{test}": _MOCK
        for test in (
            "test_receive_message_unknown",
            "test_receive_message_InvalidTaskError",
            "test_on_decode_error",
            "test_receieve_message_ack_raises",
        )
    },
    "t/unit/app/test_app.py::test_App::test_send_task_registry_without_get_keyerror": (
        "replaces the registry of an app that is not finalized by one that takes no tasks; the "
        "plugin finalizes it, because a lazily registered task may have a policy with a delay"
    ),
    "t/unit/worker/test_worker.py::test_Consumer::test_receive_message_eta": (
        "takes the first entry of the worker's timer for its message; the plugin's heartbeats, "
        "every second, stand before it"
    ),
}
