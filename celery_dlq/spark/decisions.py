"""``df.write.format("celery_dlq")``: redrives and discards the letters that rows name.

Tasks only check and collect rows. When all tasks are done, the driver redrives and
discards by the operations of the app, as the command line does. These are
crash-safe: after a crash, write the same rows again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from pyspark.sql.datasource import DataSourceWriter, WriterCommitMessage

from celery_dlq.errors import DLQError, RedriveError, SettingsError
from celery_dlq.letters.printable import get_logger
from celery_dlq.policies.checks import suggestion
from celery_dlq.spark.options import WriteOptions

logger = get_logger("celery_dlq.spark")

REDRIVE, DISCARD = "redrive", "discard"
ACTIONS = (REDRIVE, DISCARD)

_BATCH_LETTERS = 1_000

Decision = tuple[str, str, str]
"""Dead-letter queue, letter id, action."""


@dataclass
class Decisions(WriterCommitMessage):
    """The decisions of one task."""

    found: list[Decision]


class DecisionWriter(DataSourceWriter):
    """Collects decisions on executors and carries them out on the driver."""

    def __init__(self, options: WriteOptions, columns: tuple[str, ...]) -> None:
        self._options = options
        required = ["id", "action", *([] if options.queue else ["dead_letter_queue"])]
        for name in required:
            if name not in columns:
                hint = " or the option 'queue'" if name == "dead_letter_queue" else ""
                raise SettingsError(
                    f"expected rows with the column {name!r}{hint}, got only {', '.join(columns)}"
                )

    def write(self, iterator: Iterator[Any]) -> Decisions:
        """Check and collect the rows of one task."""
        found = [self._decision(row) for row in islice(iterator, self._options.maxdecisions + 1)]
        return Decisions(found)

    def commit(self, messages: Sequence[Any]) -> None:
        """Carry out all decisions; Spark calls it once, when all tasks are done."""
        limit = self._options.maxdecisions
        if sum(len(message.found) for message in messages if message) > limit:
            raise DLQError(
                f"expected at most {limit:,} decisions in one write, got more; write them in "
                f"parts, or redrive by fingerprint with: celery dlq redrive"
            )
        decisions = _distinct(d for message in messages if message for d in message.found)
        apply_decisions(_app(self._options.app), decisions)

    def _decision(self, row: Any) -> Decision:
        action = row["action"].lower() if isinstance(row["action"], str) else row["action"]
        if action not in ACTIONS:
            hint = suggestion(action, ACTIONS) if isinstance(action, str) else "it is empty"
            raise DLQError(
                f"expected the column 'action' to be redrive or discard, got {action!r}; {hint}"
            )
        queue = self._options.queue or row["dead_letter_queue"]
        if not queue or not row["id"]:
            raise DLQError(
                f"expected a letter's id and queue in every row, got {row['id']!r}, {queue!r}"
            )
        return str(queue), str(row["id"]), action


def apply_decisions(app: Any, decisions: Iterable[Decision]) -> None:
    """Redrive and discard letters of an app; letters that are gone already are skipped."""
    from celery_dlq import DeadLetters  # noqa: PLC0415 - only the driver needs Celery

    dlq = DeadLetters.of(app)
    by_target: dict[tuple[str, str], list[str]] = {}
    for queue, letter_id, action in decisions:
        by_target.setdefault((queue, action), []).append(letter_id)
    failed: dict[str, str] = {}
    refused: Counter[str] = Counter()
    for (queue, action), ids in sorted(by_target.items()):
        done: Counter[str] = Counter()
        for start in range(0, len(ids), _BATCH_LETTERS):
            some = ids[start : start + _BATCH_LETTERS]
            if action == DISCARD:
                done["discarded"] += dlq.discard(queue, ids=frozenset(some)).removed
            else:
                report = dlq.redrive(queue, ids=frozenset(some))
                done["redriven"] += report.published + report.finished
                failed |= report.failed
                refused.update(report.refused_by)
        logger.info("%s: %s of %d decided letters", queue, dict(done), len(ids))
    if failed:
        letter_id, error = next(iter(failed.items()))
        raise RedriveError(
            f"{len(failed):,} letters were not redriven and stay in their queues; the first: "
            f"{letter_id}: {error}"
        )
    if refused:
        why, letters = refused.most_common(1)[0]
        raise RedriveError(
            f"{refused.total():,} letters would be lost and stay in their queues; {letters:,} of "
            f"them because {why}"
        )


def _distinct(decisions: Iterable[Decision]) -> list[Decision]:
    """Remove repeated decisions; two actions for one letter refuse the whole write."""
    chosen: dict[tuple[str, str], str] = {}
    for queue, letter_id, action in decisions:
        if chosen.setdefault((queue, letter_id), action) != action:
            raise DLQError(
                f"expected one action per letter, got both redrive and discard for {letter_id} "
                f"in {queue!r}; nothing was done"
            )
    return [(queue, letter_id, action) for (queue, letter_id), action in chosen.items()]


def _app(name: str) -> Any:
    from celery.app.utils import find_app  # noqa: PLC0415 - only the driver needs Celery

    try:
        return find_app(name)
    except (ImportError, AttributeError, ValueError) as exc:
        raise SettingsError(
            f"expected the option 'app' to be a Celery app that the driver can import, "
            f"such as proj.app:app, got {name!r} ({type(exc).__name__}: {exc})"
        ) from exc
