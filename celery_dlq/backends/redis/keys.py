"""All Redis keys, and nothing else builds one.

``{name}`` is the hash tag: everything about one dead-letter queue lives on one
slot, so that counting, storing and removing are single atomic scripts.
"""

from __future__ import annotations

from dataclasses import dataclass

from celery_dlq.ports import MessageKey


@dataclass(frozen=True, slots=True)
class Keys:
    """Key names under one prefix.

    Attributes:
        prefix: The setting ``dlq_key_prefix``.
    """

    prefix: str = "dlq"

    def queues(self) -> str:
        """SET: names of all dead-letter queues."""
        return f"{self.prefix}:queues"

    def nodes(self) -> str:
        """ZSET: workers by their last sign of life, whatever they guard."""
        return f"{self.prefix}:{{board}}:nodes"

    def cards(self) -> str:
        """HASH: worker to its card, as JSON."""
        return f"{self.prefix}:{{board}}:cards"

    def policies(self) -> str:
        """HASH: worker to its policies, as JSON."""
        return f"{self.prefix}:{{board}}:policies"

    def overrides(self) -> str:
        """HASH: ``[queue, key]`` as JSON to an override of a policy, as JSON; and ``revision``."""
        return f"{self.prefix}:{{board}}:overrides"

    def changes(self) -> str:
        """STREAM: changes for the audit, bounded."""
        return f"{self.prefix}:{{board}}:changes"

    def letters(self, dead_letter_queue: str) -> str:
        """STREAM: one entry per letter, one field per field of the record."""
        return f"{self.prefix}:{{{dead_letter_queue}}}:letters"

    def ids(self, dead_letter_queue: str) -> str:
        """HASH: letter id to stream entry id."""
        return f"{self.prefix}:{{{dead_letter_queue}}}:ids"

    def tally(self, dead_letter_queue: str) -> str:
        """HASH: letters by reason, and count, first, last and example of each group."""
        return f"{self.prefix}:{{{dead_letter_queue}}}:tally"

    def claims(self, dead_letter_queue: str) -> str:
        """HASH: letter id to ``state|owner|lease end`` of a redrive."""
        return f"{self.prefix}:{{{dead_letter_queue}}}:claims"

    def exported(self, dead_letter_queue: str) -> str:
        """STRING: entry id up to which letters were exported to files."""
        return f"{self.prefix}:{{{dead_letter_queue}}}:exported"

    def workers(self, dead_letter_queue: str) -> str:
        """ZSET: workers that guard messages of this queue, by their last sign of life."""
        return f"{self.prefix}:{{{dead_letter_queue}}}:workers"

    def run(self, key: MessageKey) -> str:
        """HASH: counts, starts and ends of the deliveries of one task (and redrive); expires."""
        # Task ids come over the wire; what UTF-8 does not know is spelled out.
        task_id = key.task_id.encode("utf-8", "backslashreplace").decode()
        return f"{self.prefix}:{{{key.dead_letter_queue}}}:run:{key.redrives}:{task_id}"
