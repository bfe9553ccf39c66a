"""A question that is asked before its answer is needed."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from celery_dlq.backends.redis.connect import translated


class ReadAhead:
    """Lets Redis work on the next page while the last one is worked on here.

    It has a connection of its own, because an answer may be left unread.

    Args:
        client: Gives the connection's settings.
        url: For messages; its password is never shown.
    """

    def __init__(self, client: Any, url: str) -> None:
        self._client = client
        self._url = url
        self._connection: Any = None
        self.asked: tuple[Any, ...] | None = None

    def ask(self, *command: Any) -> None:
        """Send a command.

        Raises:
            StoreUnavailable: Redis does not take it.
        """
        with translated(self._url):
            if self._connection is None:
                self._connection = self._client.connection_pool.make_connection()
                self._connection.connect()
            self._connection.send_command(*command, check_health=False)
        self.asked = command

    def answer(self) -> Any:
        """Wait for the answer to what was asked.

        Raises:
            StoreUnavailable: Redis does not answer or refuses.
        """
        self.asked = None
        with translated(self._url):
            return self._connection.read_response()

    def close(self) -> None:
        """Disconnect; an answer that is on its way is not waited for."""
        self.asked = None
        if self._connection is not None:
            with suppress(Exception):
                self._connection.disconnect()
            self._connection = None
