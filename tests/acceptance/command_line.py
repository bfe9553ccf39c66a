"""``celery -A poison_app dlq …``: in the test's own process, or as one that gets signals."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from celery import _state
from celery.app import builtins
from celery.bin.celery import celery
from click.testing import CliRunner
from workers import HERE, environment

# Click before 8.2 mixes the two outputs by default; later ones cannot.
_APART = {"mix_stderr": False} if "mix_stderr" in inspect.signature(CliRunner).parameters else {}


@dataclass(frozen=True)
class Done:
    """A command that has ended."""

    exit_code: int
    stdout: str
    stderr: str

    @property
    def lines(self) -> list[dict[str, Any]]:
        """The lines that ``--json`` printed; fails if the command failed."""
        assert self.exit_code == 0, self.stderr
        return [json.loads(line) for line in self.stdout.splitlines()]


Dlq = Callable[..., Done]


def run(
    *arguments: str,
    redis_url: str,
    conf: dict[str, Any] | None = None,
    columns: int = 160,
    **env: str,
) -> Done:
    """Run ``celery -A poison_app dlq …``.

    Args:
        *arguments: What follows ``dlq``.
        redis_url: Where the app's Redis is.
        conf: Settings over those of the app.
        columns: The width of what is printed.
        **env: More of the environment.
    """
    current, default = _state._tls.current_app, _state.default_app
    with pytest.MonkeyPatch.context() as patch:
        if conf is not None or env:  # an app of its own, made as the module is imported
            patch.delitem(sys.modules, "poison_app", raising=False)
            # Its tasks are its own, too: Celery gives those of one app to all others.
            builtin = {f for f in _state._on_app_finalizers if f.__module__ == builtins.__name__}
            patch.setattr(_state, "_on_app_finalizers", builtin)
            for name, value in environment(redis_url, conf, **env).items():
                patch.setenv(name, value)
        known = sys.modules.get("poison_app")
        try:
            done = CliRunner(env={"COLUMNS": str(columns)}, **_APART).invoke(
                celery, ["-A", "poison_app", "dlq", *arguments], auto_envvar_prefix="CELERY"
            )
        finally:
            made = sys.modules.get("poison_app")
            if made is not None and made is not known:
                made.dlq.close()
                made.app.close()
            _state._tls.current_app, _state.default_app = current, default
    # Anything else would have been a traceback.
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return Done(done.exit_code, done.stdout, done.stderr)


@contextmanager
def process(*arguments: str, redis_url: str, **env: str) -> Iterator[subprocess.Popen[str]]:
    """Run ``celery -A poison_app dlq …`` as a process, for signals; killed in the end."""
    with subprocess.Popen(
        [sys.executable, "-m", "celery", "-A", "poison_app", "dlq", *arguments],
        env=environment(redis_url, **env),
        cwd=HERE,
        stdout=subprocess.PIPE,
        text=True,
    ) as running:
        try:
            yield running
        finally:
            running.kill()
