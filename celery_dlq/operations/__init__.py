"""Operations on letters: redrive, edit, discard; safe against crashes and each other."""

from celery_dlq.operations.redrive.redrive import Redriver
from celery_dlq.operations.results import DiscardReport, RedriveReport

__all__ = ["DiscardReport", "RedriveReport", "Redriver"]
