"""The processes of the tests: what they share, which would be lost without a word."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from fork_server import ForkedProcess


def test_a_forked_process_has_loaded_what_a_worker_needs_and_nothing_of_the_tests(
    tmp_path: Path,
) -> None:
    """Python is silent if the server finds nothing to load, and each worker takes half a second."""
    asked = "import sys; print(*(name in sys.modules for name in sys.argv[1:]))"
    names = ("celery.bin.celery", "celery.worker.consumer", "celery_dlq.worker.bootsteps", "pytest")
    log = tmp_path / "log"
    process = ForkedProcess(["-c", asked, *names], cwd=tmp_path, env=dict(os.environ), log=log)
    assert process.wait(30) == 0
    assert log.read_text("utf-8").split() == ["True", "True", "True", "False"]


@pytest.mark.xdist_group("one")
def test_tests_of_one_group_share_a_process(request: pytest.FixtureRequest) -> None:
    """pytest-xdist takes a group from the test's id; else each process starts a Java."""
    if request.config.getoption("loadgroup", False):
        grouped = [i.nodeid for i in request.session.items if i.get_closest_marker("xdist_group")]
        assert grouped
        assert not [nodeid for nodeid in grouped if "@" not in nodeid]
