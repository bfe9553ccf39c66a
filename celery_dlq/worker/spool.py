"""Letters on disk: where they wait when the store is down and the broker has the message no more.

One file a letter, written whole or not at all. Every worker of a host that uses
the same store empties the same folder; storing is idempotent, so two that meet
there do no harm.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from celery_dlq.backends.base import MessageKey
from celery_dlq.errors import CorruptLetter, StoreUnavailable
from celery_dlq.logs import get_logger
from celery_dlq.record import DeadLetter

logger = get_logger("celery_dlq.worker")

MOST_FILES = 100_000
_A_TICK = 1_000
_LOOK_SECONDS = 30.0

Save = Callable[[DeadLetter, MessageKey], None]


class Spool:
    """The spool of one store on this host.

    Args:
        parent: The setting ``dlq_spool_dir``; ``None`` for a private folder among the
            system's temporary files.
        store: What tells this store from others, e.g. its URL and key prefix; only a hash
            of it is used.
    """

    def __init__(self, parent: str | None, store: str) -> None:
        place = Path(parent or Path(tempfile.gettempdir()) / f"celery-dlq-{os.getuid()}")
        self.folder = place / hashlib.sha256(store.encode()).hexdigest()[:12]
        self._looked_at = -_LOOK_SECONDS
        self._may_hold = True

    def add(self, letter: DeadLetter, key: MessageKey) -> None:
        """Write a letter durably.

        Raises:
            OSError: The disk is full, the folder cannot be written, or too many wait.
        """
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if sum(1 for _ in os.scandir(self.folder)) >= MOST_FILES:
            raise OSError(f"{MOST_FILES} letters wait in {self.folder}")
        fields = {n: base64.b64encode(v).decode("ascii") for n, v in letter.to_fields().items()}
        text = json.dumps({"key": asdict(key), "fields": fields})
        handle, temporary = tempfile.mkstemp(dir=self.folder, prefix=".", suffix=".tmp")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            Path(temporary).replace(self.folder / f"{letter.id}.json")
        except OSError:
            with suppress(OSError):
                Path(temporary).unlink()
            raise
        self._may_hold = True

    def flush(self, save: Save) -> int:
        """Store what waits, and remove its files; never raises.

        Args:
            save: Stores one letter; its `StoreUnavailable` ends the flush.

        Returns:
            How many letters were stored.
        """
        now = time.monotonic()
        if not self._may_hold and now - self._looked_at < _LOOK_SECONDS:
            return 0
        self._looked_at, stored = now, 0
        try:
            for path in self._files():
                stored += self._flush_one(path, save)
        except (StoreUnavailable, OSError) as exc:
            logger.debug("The spool %s waits on: %s", self.folder, exc)
            return stored
        self._may_hold = stored == _A_TICK
        return stored

    def __len__(self) -> int:
        """How many letters wait."""
        return len(list(self.folder.glob("*.json"))) if self.folder.exists() else 0

    def _files(self) -> list[Path]:
        if not self.folder.exists():
            return []
        return sorted(self.folder.glob("*.json"))[:_A_TICK]

    def _flush_one(self, path: Path, save: Save) -> int:
        try:
            content = json.loads(path.read_text("utf-8"))
            fields = {n: base64.b64decode(v) for n, v in content["fields"].items()}
            letter, key = DeadLetter.from_fields(fields), MessageKey(**content["key"])
        except FileNotFoundError:
            return 0  # another worker was first
        except (ValueError, KeyError, TypeError, CorruptLetter) as exc:
            # Kept for a person, out of the way.
            logger.error("%s is no letter, set aside: %r", path, exc)  # noqa: TRY400
            path.replace(path.with_suffix(".broken"))
            return 0
        try:
            save(letter, key)
        except (StoreUnavailable, OSError):
            raise
        except Exception:
            # An error of our own, which would come again with every look at the spool.
            logger.exception("%s cannot be stored, set aside", path)
            path.replace(path.with_suffix(".broken"))
            return 0
        with suppress(FileNotFoundError):
            path.unlink()
        return 1
