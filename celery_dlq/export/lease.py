"""One export at a time to a place that many machines reach, by the store that they share.

No object store keeps a second writer out, and no lease does alone: a process may stop for an hour
between looking at its lease and writing. So what decides is noted in the store, in one step with
the question whose turn it is:

- The range of letters is noted there before the first file is put in place. A process that lost
  its turn cannot note another; files of the range that it noted before may still come, and the
  next owner writes files of the same names with the same letters first.
- The checkpoint is noted there before it is written to the folder. A late checkpoint in the folder
  is older than what the store says, and the later of both counts.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any
from uuid import uuid4

from celery_dlq.backends.base import ExportLease, ExportLeaseStore
from celery_dlq.errors import ExportError, StoreUnavailable

LEASE_SECONDS = 15.0
"""How long a killed export keeps others out; a stopped one may be overtaken then."""

_POLL_SECONDS = 0.2


class ExportLeases:
    """The leases of one run of an export, kept until it ends.

    Args:
        store: What all machines share.
        place: Where the files go.
    """

    def __init__(self, store: ExportLeaseStore, place: str) -> None:
        self._store = store
        self._place = place
        # A bar separates the owner from the rest.
        host = socket.gethostname().replace("|", "_")
        self._owner = f"{host} pid {os.getpid()} {uuid4().hex[:8]}"
        self._queues: list[str] = []
        self._ended = threading.Event()
        self._keeper = threading.Thread(target=self._keep, name="celery_dlq-leases", daemon=True)

    def take(self, queue: str) -> Mapping[str, Any] | None:
        """Wait until the last owner is done or gone; returns what was noted last.

        Raises:
            ExportError: It is at work.
        """
        first = lease = self._ask(queue, "take")
        until = time.monotonic() + LEASE_SECONDS + 1
        while not lease.acquired:
            if lease.state != first.state or time.monotonic() > until:  # a heartbeat
                raise self._taken(lease)
            time.sleep(_POLL_SECONDS)
            lease = self._ask(queue, "take")
        self._queues.append(queue)
        if len(self._queues) == 1:
            self._keeper.start()
        noted = json.loads(lease.state) if lease.state else None
        return noted if isinstance(noted, dict) else None

    def note(self, queue: str, state: Mapping[str, Any]) -> None:
        """Note a checkpoint, if it is still our lease.

        Raises:
            ExportError: Another export took over.
        """
        lease = self._ask(queue, "note", json.dumps(state))
        if not lease.acquired:
            raise self._taken(lease)

    def end(self) -> None:
        """Let others in; never raises."""
        self._ended.set()
        if self._keeper.is_alive():
            self._keeper.join()
        for queue in self._queues:
            with suppress(StoreUnavailable):
                self._ask(queue, "end")

    def _ask(self, queue: str, what: Any, state: str = "") -> ExportLease:
        return self._store.export_lease(
            queue, what, self._place, owner=self._owner, lease_seconds=LEASE_SECONDS, state=state
        )

    def _keep(self) -> None:
        while not self._ended.wait(LEASE_SECONDS / 3):
            for queue in list(self._queues):
                with suppress(StoreUnavailable):  # what is noted next will tell
                    self._ask(queue, "keep")

    def _taken(self, lease: ExportLease) -> ExportError:
        return ExportError(
            f"expected {self._place} to be free, got another export that is writing there "
            f"({lease.state.partition('|')[0] or 'it has ended since'}); nothing is lost, run the "
            f"export again when that one has ended, or choose another folder"
        )
