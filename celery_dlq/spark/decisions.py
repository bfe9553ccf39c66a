"""``df.write.format("celery_dlq")``: carries out what a triage decided.

Tasks only check and gather rows; nothing happens before all of them are done. Then
the driver redrives and discards through the operations of the app, the same
crash-safe path that the command line takes: killed in the middle, write again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from pyspark.sql.datasource import DataSourceWriter, WriterCommitMessage

from celery_dlq.errors import DLQError, RedriveError, SettingsError
from celery_dlq.logs import get_logger
from celery_dlq.policies.policy import suggestion
from celery_dlq.spark.options import WriteOptions

logger = get_logger("celery_dlq.spark")

REDRIVE, DISCARD = "redrive", "discard"
ACTIONS = (REDRIVE, DISCARD)

_BATCH = 1_000

Decision = tuple[str, str, str]
"""Dead-letter queue, letter id, action."""


@dataclass
class Decisions(WriterCommitMessage):
    """What one task gathered."""

    found: list[Decision]


class DecisionWriter(DataSourceWriter):
    """Gathers decisions on executors and carries them out on the driver.

    Args:
        options: The app, and the queue if rows do not name it.
        columns: The columns of the rows.
    """

    def __init__(self, options: WriteOptions, columns: tuple[str, ...]) -> None:
        self._options = options
        wanted = ["id", "action", *([] if options.queue else ["dead_letter_queue"])]
        for name in wanted:
            if name not in columns:
                hint = " or the option 'queue'" if name == "dead_letter_queue" else ""
                raise SettingsError(
                    f"expected rows with the column {name!r}{hint}, got only {', '.join(columns)}"
                )

    def write(self, iterator: Iterator[Any]) -> Decisions:
        """Check the rows of one task."""
        found = [self._decision(row) for row in islice(iterator, self._options.maxdecisions + 1)]
        return Decisions(found)

    def commit(self, messages: Sequence[Any]) -> None:
        """Carry out all decisions; called once, when all tasks are done."""
        most = self._options.maxdecisions
        if sum(len(message.found) for message in messages if message) > most:
            raise DLQError(
                f"expected at most {most:,} decisions in one write, got more; write them in "
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
    """Redrive and discard letters of an app. A letter that is gone already is no error.

    Raises:
        NotFound: There is no such dead-letter queue.
        RedriveError: The broker did not take some messages; their letters stay.
        StoreUnavailable: Redis does not answer.
    """
    from celery_dlq import DeadLetters  # noqa: PLC0415 - only the driver needs Celery

    dlq = DeadLetters.of(app)
    by_target: dict[tuple[str, str], list[str]] = {}
    for queue, letter_id, action in decisions:
        by_target.setdefault((queue, action), []).append(letter_id)
    failed: dict[str, str] = {}
    for (queue, action), ids in sorted(by_target.items()):
        done: Counter[str] = Counter()
        for start in range(0, len(ids), _BATCH):
            some = ids[start : start + _BATCH]
            if action == DISCARD:
                done["discarded"] += dlq.discard(queue, ids=frozenset(some)).removed
            else:
                report = dlq.redrive(queue, ids=frozenset(some))
                done["redriven"] += report.published + report.finished
                failed |= report.failed
        logger.info("%s: %s of %d decided letters", queue, dict(done), len(ids))
    if failed:
        letter_id, error = next(iter(failed.items()))
        raise RedriveError(
            f"expected the broker to take all redriven letters, got {len(failed):,} refused; "
            f"they stay where they are. The first: {letter_id}: {error}"
        )


def _distinct(decisions: Iterable[Decision]) -> list[Decision]:
    """Each letter once; two actions for one letter stop all of them."""
    chosen: dict[tuple[str, str], str] = {}
    for queue, letter_id, action in decisions:
        if chosen.setdefault((queue, letter_id), action) != action:
            raise DLQError(
                f"expected one action a letter, got both redrive and discard for {letter_id} "
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
