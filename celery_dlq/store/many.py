"""Commands to many dead-letter queues at once: there may be thousands."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

_QUEUES_PER_WRITE = 25
"""Few, so that Redis serves others in between: it may read two large letters per queue."""


def of_each(
    client: Any, names: Sequence[str], *asks: Callable[[Any, str], object]
) -> Iterator[tuple[str, list[Any]]]:
    """Send the same commands for many queues, in pipelines."""
    for start in range(0, len(names), _QUEUES_PER_WRITE):
        some = names[start : start + _QUEUES_PER_WRITE]
        pipe = client.pipeline(transaction=False)
        for name in some:
            for ask in asks:
                ask(pipe, name)
        replies = iter(pipe.execute())
        for name in some:
            yield name, [next(replies) for _ in asks]
