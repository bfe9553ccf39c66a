"""Tests of Celery's that must fail with the plugin on every app, each with the reason why.

An entry that does not fail only with the plugin any more is a fault, too.
"""

from __future__ import annotations

REASONS = {
    "t/unit/worker/test_worker.py::test_Consumer::test_receive_message_eta": (
        "takes the first entry of the worker's timer for its message; the plugin's heartbeats, "
        "every second, stand before it"
    ),
}
