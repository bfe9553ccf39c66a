"""The comparison of Celery's own suites: what it counts as a fault of the plugin's."""

from __future__ import annotations

from pathlib import Path

import pytest
from upstream import __main__ as command

SUITE = """
import os
from pathlib import Path
from celery import Celery

def guarded():
    return hasattr(Celery("suite"), "_celery_dlq")

def test_passes():
    assert Celery("suite")

def test_always_fails():
    assert not Celery("suite")

def test_fails_only_with_the_plugin():
    assert not guarded()

def test_fails_only_with_the_plugin_for_a_reason():
    assert not guarded()

def test_fails_once_with_the_plugin():
    mark = Path(os.environ["ONCE"])
    if guarded() and not mark.exists():
        mark.touch()
        raise AssertionError
"""
FILE = "t/unit/worker/test_suite.py"


@pytest.fixture
def suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder like that of Celery's sources."""
    monkeypatch.setenv("ONCE", str(tmp_path / "once"))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # some of them load slowly
    monkeypatch.setattr(
        command,
        "REASONS",
        {
            f"{FILE}::test_fails_only_with_the_plugin_for_a_reason": "it looks for it",
            f"{FILE}::test_passes": "a reason that is gone",
            "t/unit/app/test_other.py::test_other": "of another suite",
        },
    )
    folder = tmp_path / "celery"
    (folder / FILE).parent.mkdir(parents=True)
    (folder / FILE).write_text(SUITE)
    (folder / "pyproject.toml").write_text("[tool.pytest.ini_options]\n")
    return folder


def test_only_what_fails_again_with_the_plugin_alone_and_old_reasons_are_faults(
    suite: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A test that fails both ways is Celery's; one that fails once is reported."""
    faults = command.compared(suite, "worker", "t/unit/worker")
    assert {fault.split()[0] for fault in faults} == {
        f"{FILE}::test_fails_only_with_the_plugin",
        f"{FILE}::test_passes",
    }
    assert "assert not True" in "".join(faults)
    said = capsys.readouterr().out
    assert "without the plugin: 4 passed, 1 failed; 0 apps had it" in said
    assert "with the plugin: 1 passed, 4 failed; " in said
    assert f"{FILE}::test_fails_once_with_the_plugin failed once" in said


def test_a_run_that_does_not_end_is_a_fault(suite: Path) -> None:
    """It names the test that was the last."""
    (suite / FILE).write_text("import os\n\ndef test_ends_all():\n    os._exit(1)\n")
    (fault,) = command.compared(suite, "worker", "t/unit/worker")
    assert fault.startswith("expected worker to end, its last test was ")
    assert "test_ends_all" in fault
