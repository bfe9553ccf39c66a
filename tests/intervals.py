"""The one way in which tests change the intervals of `celery_dlq.timing` and of features."""

from __future__ import annotations

import os
import pickle
from dataclasses import replace
from typing import Any

import pytest

from celery_dlq import timing
from celery_dlq.registry import interval

PLACE = "TEST_TIMING"


def change(patch: pytest.MonkeyPatch, **intervals: Any) -> None:
    """Change some, here and in the processes of this test that `inherit`."""
    core, of_features = {}, dict(timing.current.of_features)
    for name, value in intervals.items():
        if hasattr(timing.current, name):
            core[name] = value
        else:
            assert interval(name) is not None, "a feature has it"
            of_features[name] = value
    changed = replace(timing.current, **core, of_features=of_features)
    patch.setattr(timing, "current", changed)
    patch.setenv(PLACE, pickle.dumps(changed).hex())


def inherit() -> None:
    """Take over the intervals of the test that started this process."""
    if PLACE in os.environ:
        timing.current = pickle.loads(bytes.fromhex(os.environ[PLACE]))
