"""Which of the messages that a worker holds are at work: a lost connection gives back the others.

A message is idle until its pool gets it, or, where tasks run in this process, until its thread
or greenlet begins; then it is at work until it ends. The start and the lost connection, which may
be in different threads, take an idle message in one atomic step. So nothing starts that goes
back, and nothing goes back that starts.
"""

from __future__ import annotations


class Claims:
    """The idle messages, and those at work whose connection is lost, by their tags."""

    def __init__(self) -> None:
        self._idle: set[str] = set()
        self.orphans: set[str] = set()
        self.add = self._idle.add  # a message that was received

    def begin(self, tag: str) -> bool:
        """Take an idle message to work; False if it goes back."""
        try:
            self._idle.remove(tag)
        except KeyError:
            return False
        return True

    def put_off(self, tag: str) -> bool:
        """Make a message idle again; False if the caller is to give it back."""
        self._idle.add(tag)
        return tag not in self.orphans or not self._is_to_go_back(tag)

    def connection_closes(self, tag: str) -> bool:
        """True if the caller is to give a message back; else it stays at work."""
        self.orphans.add(tag)  # first: `put_off` may run at the same time
        return self._is_to_go_back(tag)

    def forget(self, tag: str) -> None:
        """Forget a message that is held no longer."""
        self._idle.discard(tag)
        self.orphans.discard(tag)

    def _is_to_go_back(self, tag: str) -> bool:
        if not self.begin(tag):
            return False
        self.orphans.discard(tag)
        return True
