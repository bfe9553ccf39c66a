"""What the audit says of changes that are no jobs and whose process ended in the middle."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from builders import DLQ, a_letter, an_app, key_of
from fresh import fresh_conf

from celery_dlq import DeadLetters
from celery_dlq.store.letters import Letters


class KilledError(BaseException):
    """The process ends here."""


@pytest.fixture
def dlq() -> Iterator[DeadLetters]:
    """Ten letters of a queue that may have one."""
    app = an_app(**fresh_conf(), dlq_queues={"orders": {"dead_letter_max_length": 1}})
    made = DeadLetters(app)
    for _ in range(10):
        letter = a_letter()
        made.store.dead_letter(letter, key_of(letter))
    yield made
    made.close()


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], None]:
    """Do something in a process that dies after the second step of a removal, of two letters."""
    inner = Letters.remove

    def remove(self: Letters, queue: str, letter_ids: Iterable[str], **more: Any) -> int:
        ids = list(letter_ids)
        for some in (ids[:2], ids[2:4]):
            inner(self, queue, some, **more)
        raise KilledError

    def do(what: Callable[[], object]) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(Letters, "remove", remove)
            with pytest.raises(KilledError):
                what()

    return do


def test_a_trim_that_was_killed_is_in_the_audit_with_what_it_removed(
    dlq: DeadLetters, killed: Callable[[Callable[[], object]], None]
) -> None:
    """Neither all that it wanted to remove, nor nothing."""
    killed(dlq.trim)
    assert dlq.store.length(DLQ) == 6
    (change,) = dlq.changes()
    assert (change.action, change.letters) == ("trimmed", 4)
    assert change.detail["state"] == "unfinished"


def test_an_export_that_was_killed_while_it_trimmed_is_in_the_audit(
    dlq: DeadLetters, killed: Callable[[Callable[[], object]], None], tmp_path: Path
) -> None:
    """The next export removes the others, in an entry of its own."""
    killed(lambda: dlq.export(tmp_path, then_trim=True))
    assert [change.letters for change in dlq.changes()] == [4]
    assert dlq.export(tmp_path, then_trim=True).trimmed == 6
    assert [change.letters for change in dlq.changes()] == [6, 4]
    assert {change.detail["exported_to"] for change in dlq.changes()} == {str(tmp_path)}
