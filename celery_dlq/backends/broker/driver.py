"""What a broker's queues must do for the store, and what its kinds have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from kombu.exceptions import KombuError

from celery_dlq.backends.broker.message import LetterMessage
from celery_dlq.backends.broker.snapshot import Entry, Snapshot
from celery_dlq.errors import StoreError, StoreUnavailable

MOST_LETTERS = 50_000
"""Most letters of one queue that are read: what RabbitMQ gives one consumer is bounded too."""

MOST_BYTES = 8 * 1024**3
"""Most bytes of one queue that are read; they are written to a temporary file."""

LOCK_SUFFIX = ".reader"

WAIT_SECONDS = 10.0
"""How long one who reads waits for another one, or for a broker that gives nothing."""

CONNECT: dict[str, Any] = {"max_retries": 1, "interval_start": 0.2, "interval_step": 0.2}

Connect = Callable[..., Any]
"""Makes a connection; takes ``transport_options`` and ``heartbeat``."""


class HeldQueue(Protocol):
    """A queue from which nobody else removes letters."""

    snapshot: Snapshot
    present: bool  # or there is no such queue yet

    def __len__(self) -> int:
        """How many messages are not in the queue meanwhile."""

    def refresh(self) -> None:
        """Read what arrived meanwhile."""

    def remove(self, entries: Sequence[Entry]) -> None:
        """Take letters out of the queue for good."""

    def give_back(self) -> None:
        """Let others have the queue; never raises."""


class QueueDriver(Protocol):
    """The queues of one broker. Every method may raise `StoreUnavailable`."""

    def check(self) -> None:
        """Do nothing but answer."""

    def put(self, queue: str, letter: LetterMessage) -> None:
        """Put a letter into a queue, which is made if need be; confirmed."""

    def length(self, queue: str) -> int:
        """How many messages wait in a queue."""

    def read(self, queue: str) -> tuple[Snapshot, HeldQueue | None]:
        """Read a queue and change nothing; the queue is held if that must be for a while."""

    def hold(self, queue: str) -> HeldQueue:
        """Read a queue and hold it."""

    def close(self) -> None:
        """Disconnect; never raises."""


def busy(queue: str) -> StoreUnavailable:
    """What to say to the second of two operators."""
    return StoreUnavailable(
        f"expected the dead-letter queue {queue!r} to be free, got one that another process has "
        f"been reading or changing for {WAIT_SECONDS:.0f} s; with letters on the broker only one "
        f"can. `dlq jobs` shows what runs; try again when it is done"
    )


@contextmanager
def translated(connection: Any) -> Iterator[None]:
    """ExportLease what a broker's client raises into `StoreUnavailable`; shows no password."""
    try:
        yield
    except StoreError:
        raise
    except (
        *connection.transport.channel_errors,
        *connection.transport.connection_errors,
        KombuError,
        OSError,
    ) as exc:
        raise StoreUnavailable(
            f"expected the broker {connection.as_uri()} to keep dead letters, got "
            f"{type(exc).__name__}: {exc}"
        ) from exc
