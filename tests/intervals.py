"""The one way in which tests change the package's intervals (`celery_dlq.timing`)."""

from __future__ import annotations

import os
import pickle
from dataclasses import replace
from typing import Any

import pytest

from celery_dlq import timing

PLACE = "TEST_TIMING"


def change(patch: pytest.MonkeyPatch, **intervals: Any) -> None:
    """Change some, here and in the processes of this test that `inherit`."""
    changed = replace(timing.current, **intervals)
    patch.setattr(timing, "current", changed)
    patch.setenv(PLACE, pickle.dumps(changed).hex())


def inherit() -> None:
    """Take over the intervals of the test that started this process."""
    if PLACE in os.environ:
        timing.current = pickle.loads(bytes.fromhex(os.environ[PLACE]))
