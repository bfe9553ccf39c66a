"""Asking many dead-letter queues at once: there may be thousands."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

_AT_ONCE = 100
"""So many queues are asked in one write; Redis answers others in between."""


def of_each(
    client: Any, names: Sequence[str], *asks: Callable[[Any, str], object]
) -> Iterator[tuple[str, list[Any]]]:
    """Ask the same of many queues, with one wait for a hundred of them.

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
