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

    def tasks(self) -> str:
        """HASH: worker to the names of its tasks, as JSON; apart, because there may be many."""
        return f"{self.prefix}:{{board}}:tasks"

    def overrides(self) -> str:
        """HASH: ``[queue, key]`` as JSON to an override of a policy, as JSON; and ``revision``."""
        return f"{self.prefix}:{{board}}:overrides"

    def changes(self) -> str:
        """STREAM: changes for the audit, bounded."""
        return f"{self.prefix}:{{board}}:changes"

    def counts(self) -> str:
        """HASH: metric and its labels as JSON to a count; bounded."""
        return f"{self.prefix}:{{board}}:counts"

    def gauges(self) -> str:
        """HASH: worker to ``time|gauges as JSON``; bounded."""
        return f"{self.prefix}:{{board}}:gauges"

    def report(self, dead_letter_queue: str, fingerprint: str) -> str:
        """HASH: what an error tracker was told of a group; expires."""
        return f"{self.prefix}:{{{dead_letter_queue}}}:report:{fingerprint}"

    def allowance(self, dead_letter_queue: str) -> str:
        """HASH: how many reports of this queue are allowed now; expires."""
        return f"{self.prefix}:{{{dead_letter_queue}}}:allowance"

    def letters(self, dead_letter_queue: str) -> str:
        """STREAM: one entry per letter, one field per field of the record."""
        return f"{self.prefix}:{{{dead_letter_queue}}}:letters"

    def ids(self, dead_letter_queue: str) -> str:
        """HASH: letter id to stream entry id."""
        return f"{self.prefix}:{{{dead_letter_queue}}}:ids"

    def tally(self, dead_letter_queue: str) -> str:
        """HASH: letters by reason, and count, first, last and example of each group."""
        return f"{self.prefix}:{{{dead_letter_queue}}}:tally"

    def ends(self, dead_letter_queue: str) -> str:
        """ZSET: letter id by the end of its message's life; only letters that have one."""
        return f"{self.prefix}:{{{dead_letter_queue}}}:ends"

    def claims(self, dead_letter_queue: str) -> str:
        """HASH: letter id to ``state|owner|lease end`` of a redrive."""
        return f"{self.prefix}:{{{dead_letter_queue}}}:claims"

    def exported(self, dead_letter_queue: str) -> str:
        """STRING: entry id up to which letters were exported to files."""
        return f"{self.prefix}:{{{dead_letter_queue}}}:exported"

    def outbox(self, dead_letter_queue: str) -> str:
        """ZSET: notices for a dead-letter exchange, as JSON, by when they may be tried again."""
        return f"{self.prefix}:{{{dead_letter_queue}}}:outbox"

    def workers(self, dead_letter_queue: str) -> str:
        """ZSET: workers that guard messages of this queue, by their last sign of life."""
        return f"{self.prefix}:{{{dead_letter_queue}}}:workers"

    def run(self, key: MessageKey) -> str:
        """HASH: counts, starts and ends of the deliveries of one task (and redrive); expires."""
        # Task ids come over the wire; what UTF-8 does not know is spelled out.
        task_id = key.task_id.encode("utf-8", "backslashreplace").decode()
        return f"{self.prefix}:{{{key.dead_letter_queue}}}:run:{key.redrives}:{task_id}"
