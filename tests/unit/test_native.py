"""Threads of the operating system, in pools that replace Python's."""

from __future__ import annotations

import subprocess
import sys

import pytest

PATCHES = {
    "eventlet": "eventlet.monkey_patch()",
    "gevent": "from gevent import monkey; monkey.patch_all()",
    "none": "",
}
RUNS_WHILE_BUSY = """
import time
from celery_dlq.transport import held

ran = []
held.start_thread(lambda: (held.sleep(0.05), ran.append(1)))
end = time.monotonic() + 10
while not ran and time.monotonic() < end:
    pass
raise SystemExit(not ran)
"""


@pytest.mark.parametrize("also_imported", ["eventlet", "gevent"])
@pytest.mark.parametrize("patched_by", PATCHES)
def test_a_thread_runs_while_the_others_are_busy(patched_by: str, also_imported: str) -> None:
    """Also when the other library is imported and unused: sentry_sdk imports both."""
    imports = {also_imported, patched_by} - {"none"}
    for name in imports:
        pytest.importorskip(name)
    lines = [*(f"import {name}" for name in imports), PATCHES[patched_by]]
    lines.append(f"import {also_imported}" + (".monkey" if also_imported == "gevent" else ""))
    program = "\n".join([*lines, RUNS_WHILE_BUSY])
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True, timeout=60)
