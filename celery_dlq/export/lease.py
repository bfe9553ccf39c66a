"""One export at a time to a folder that several machines reach, by a lease in their shared store.

An object store does not keep a second writer out, and a lease alone does not either: a process may
be paused for an hour between checking its lease and writing. So the store keeps the state of the
export, and writes it in one step with checking the lease:

- The range of letters is saved there before the first file is put in place. A process that lost
  its lease cannot save another range. Its files of the earlier range may still arrive late; the
  next owner first writes files of the same names with the same letters.
- The checkpoint is saved there before it is written to the folder. A checkpoint that arrives late
  in the folder is older than the store's, and the later of the two counts.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from celery_dlq.errors import ExportError, StoreUnavailable
from celery_dlq.export.destination import Destination
from celery_dlq.logs import readable

if TYPE_CHECKING:
    from celery_dlq.store.lease import Lease, LeaseReply
    from celery_dlq.store.letters import Letters

LEASE_SECONDS = 15.0
"""A killed export keeps others out for this long; a paused one loses its lease after it."""

_POLL_SECONDS = 0.2


class ExportLeases:
    """The leases of one run of an export, kept until it ends."""

    def __init__(
        self, store: Letters, destination: Destination, store_id: str, folder: str
    ) -> None:
        self._store = store
        self._name = destination.name
        self._place = destination.shared or folder
        self.is_local = destination.shared is None
        self._seconds = LEASE_SECONDS if destination.shared else 0.0
        self.store_id = store_id
        self.folder = folder
        self.refused = False
        # The stored state is ``owner|…``.
        host = socket.gethostname().replace("|", "_")
        self._owner = f"{host} pid {os.getpid()} {uuid4().hex[:8]}"
        self._held: dict[str, Lease] = {}
        self._ended = threading.Event()
        self._keeper = threading.Thread(target=self._keep, name="celery_dlq-leases", daemon=True)

    def take(self, queue: str) -> Mapping[str, Any] | None:
        """Acquire a queue's lease, waiting until a dead owner's expires; return the saved state."""
        lease = self._store.leases.of(queue, self._place, self._owner, self._seconds)
        first = reply = lease.acquire()
        until = time.monotonic() + self._seconds + 1
        while not reply.acquired:
            if reply.state != first.state or time.monotonic() > until:  # renewed
                raise self._taken(reply)
            time.sleep(_POLL_SECONDS)
            reply = lease.acquire()
        self._held[queue] = lease
        if self._seconds and self._keeper.ident is None:
            self._keeper.start()
        state = readable(
            f"the state of an export of {queue}", partial(json.loads, reply.state or "null")
        )
        return state if isinstance(state, dict) else None

    def note(self, queue: str, state: Mapping[str, Any]) -> None:
        """Save a checkpoint in the store, if the lease is still held."""
        reply = self._held[queue].note(json.dumps(state))
        if not reply.acquired:
            raise self._taken(reply)

    def end(self) -> None:
        """Release the leases; never raises."""
        self._ended.set()
        if self._keeper.is_alive():
            self._keeper.join()
        for lease in self._held.values() if self._seconds else ():
            with suppress(StoreUnavailable):
                lease.release()

    def _keep(self) -> None:
        while not self._ended.wait(self._seconds / 3):
            for lease in list(self._held.values()):
                with suppress(StoreUnavailable):  # the next `note` finds out
                    lease.renew()

    def _taken(self, reply: LeaseReply) -> ExportError:
        self.refused = True
        return ExportError(
            f"another export is writing to {self._name} "
            f"({reply.state.partition('|')[0] or 'it has ended since'}); nothing is lost, run the "
            f"export again when that one has ended, or choose another folder"
        )
