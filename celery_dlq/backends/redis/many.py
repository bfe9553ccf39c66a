"""Asking many dead-letter queues at once, because there may be thousands."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

_AT_ONCE = 25
"""Queues that are asked in one write. Few: Redis answers others in between, and it looks at the
first and the last letter of each, which may be large."""


def of_each(
    client: Any, names: Sequence[str], *asks: Callable[[Any, str], object]
) -> Iterator[tuple[str, list[Any]]]:
    """Ask the same of many queues, with one wait for some of them.

    Args:
        client: A redis-py client.
        names: The queues.
        *asks: Each puts one command about a queue into a pipeline.

    Returns:
        Each queue with the replies about it.
    """
    for start in range(0, len(names), _AT_ONCE):
        some = names[start : start + _AT_ONCE]
        pipe = client.pipeline(transaction=False)
        for name in some:
            for ask in asks:
                ask(pipe, name)
        replies = iter(pipe.execute())
        for name in some:
            yield name, [next(replies) for _ in asks]
