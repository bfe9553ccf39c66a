"""Redaction in a worker: letters and log lines, before anybody sees them."""

from __future__ import annotations

from celery_dlq.features.redaction import masked_log
from celery_dlq.features.redaction.masking import Redaction
from celery_dlq.letters.record import DeadLetter
from celery_dlq.worker.observer import Observer, WorkerParts


def observer(parts: WorkerParts) -> Observer | None:
    """The observer of a worker that redacts."""
    masked_log.install(parts.redaction)  # also without rules: it replaces those of before
    return RedactionObserver(parts.redaction) if parts.redaction else None


class RedactionObserver(Observer):
    """Masks letters when they are made."""

    def __init__(self, redaction: Redaction) -> None:
        self._redaction = redaction

    def on_letter(self, letter: DeadLetter) -> DeadLetter:
        """Mask a letter's descriptive fields."""
        return self._redaction.captured(letter)
