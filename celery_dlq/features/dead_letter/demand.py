"""What an operator demands of all workers: that a message becomes a letter."""

from __future__ import annotations

from dataclasses import dataclass

from celery_dlq.store.instructions import Instruction


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand(Instruction):
    """The message of the task with this id becomes a letter instead of being executed.

    Not that of a redrive which began later.
    """

    kind = "demand"

    @property
    def text(self) -> str:
        """The description of the letter."""
        by = f"dead-lettered by {self.actor}"
        return f"{self.reason} ({by})" if self.reason else by
