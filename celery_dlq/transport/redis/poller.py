"""Waiting for several channels at once.

Source: ``MultiChannelPoller`` in
https://github.com/celery/kombu/blob/main/kombu/transport/redis.py
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from kombu.transport import redis as kombu_redis

from celery_dlq.transport.redis.wake import LOOK_SECONDS, WakeConnection


class ReliablePoller(kombu_redis.MultiChannelPoller):
    """Fetches by script while there are messages, else waits to be woken."""

    loop: Any = None  # The worker's event loop; `None` without one, e.g. in gevent

    def _register_BRPOP(self, channel: Any) -> None:  # noqa: N802 - kombu's name
        if not channel.is_asleep():
            if channel.may_be_closed():
                channel.look_at_idle_connection()
            super()._register_BRPOP(channel)

    def on_readable(self, fileno: int) -> Any:
        """Call the channel whose socket can be read."""
        channel, kind = self._fd_to_chan.get(fileno, (None, None))
        if channel is None:  # kombu before 5.7 raises KeyError
            return None
        if kind == "WAKE":
            return channel.wake_read()  # whether it may consume or not
        if kind == "BRPOP" and not channel.qos.can_consume():
            if not channel._in_poll:  # noqa: SLF001
                return channel.look_at_idle_connection()
            if not hasattr(self, "_paused_brpop"):  # kombu before 5.7 reads nothing, and spins
                return channel.handlers[kind]()
        return super().on_readable(fileno)

    def handle_event(self, fileno: int, event: int) -> Any:
        """Call the channel; after waking nothing was received yet, so `get` goes on."""
        channel, kind = self._fd_to_chan.get(fileno, (None, None))
        return channel.wake_read() if kind == "WAKE" else super().handle_event(fileno, event)

    def get(self, callback: Any, timeout: float | None = None) -> Any:
        """Wait for an event, without an event loop."""
        due = min((channel.tick() for channel in tuple(self._channels)), default=LOOK_SECONDS)
        return super().get(callback, timeout=due if timeout is None else min(due, timeout))

    def tick(self) -> None:
        """Let all channels do what is due; called by the event loop's timer."""
        for channel in tuple(self._channels):
            channel.tick()

    def listen(self, channel: Any, wake: WakeConnection, sock: Any) -> None:
        """Call the channel when its wake connection can be read."""
        fileno = sock.fileno()
        self._fd_to_chan[fileno] = (channel, "WAKE")
        self._chan_to_sock[channel, wake, "WAKE"] = sock
        self.poller.register(sock, self.eventflags)
        if self.loop is not None:
            self.loop.add_reader(fileno, self.on_readable, fileno)

    def forget(self, channel: Any, client: Any, kind: str = "WAKE") -> None:
        """Watch a socket no longer; it may be closed already."""
        self._chan_to_sock.pop((channel, client, kind), None)
        for fileno, listener in list(self._fd_to_chan.items()):
            if listener == (channel, kind):
                del self._fd_to_chan[fileno]
                with suppress(KeyError, ValueError, OSError):
                    remove = self.poller.unregister if self.loop is None else self.loop.remove
                    remove(fileno)
