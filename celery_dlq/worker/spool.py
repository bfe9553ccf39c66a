"""The spool: letters of acknowledged messages, on disk while the store is down.

One file per letter, written atomically. All workers of a host that use the same store share a
folder; storing is idempotent, so two workers may store the same file.
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

MAX_FILES = 100_000
_LETTERS_PER_FLUSH = 1_000
_LOOK_SECONDS = 30.0

Save = Callable[[DeadLetter, MessageKey], None]


class Spool:
    """The spool of one store on this host.

    Args:
        parent: The setting ``dlq_spool_dir``; ``None`` for a private folder among the
            system's temporary files.
        store: Identity of the store, e.g. its URL and key prefix; only its hash is used.
    """

    def __init__(self, parent: str | None, store: str) -> None:
        place = Path(parent or Path(tempfile.gettempdir()) / f"celery-dlq-{os.getuid()}")
        self.folder = place / hashlib.sha256(store.encode()).hexdigest()[:12]
        self._looked_at = -_LOOK_SECONDS
        self._may_hold = True

    def add(self, letter: DeadLetter, key: MessageKey) -> None:
        """Write a letter durably.

        Raises:
            OSError: The disk is full, the folder is not writable, or too many files wait.
        """
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if sum(1 for _ in os.scandir(self.folder)) >= MAX_FILES:
            raise OSError(f"{MAX_FILES} letters wait in {self.folder}")
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
        """Store waiting letters and remove their files; never raises.

        Args:
            save: Stores one letter; its `StoreUnavailable` ends the flush.

        Returns:
            The number of letters stored.
        """
        now = time.monotonic()
        if not self._may_hold and now - self._looked_at < _LOOK_SECONDS:
            return 0
        self._looked_at, stored = now, 0
        try:
            for path in self._files():
                stored += self._flush_one(path, save)
        except (StoreUnavailable, OSError) as exc:
            logger.debug("The spool %s is not emptied yet: %s", self.folder, exc)
            return stored
        self._may_hold = stored == _LETTERS_PER_FLUSH
        return stored

    def __len__(self) -> int:
        """The number of letters that wait."""
        return len(list(self.folder.glob("*.json"))) if self.folder.exists() else 0

    def _files(self) -> list[Path]:
        if not self.folder.exists():
            return []
        return sorted(self.folder.glob("*.json"))[:_LETTERS_PER_FLUSH]

    def _flush_one(self, path: Path, save: Save) -> int:
        try:
            content = json.loads(path.read_text("utf-8"))
            fields = {n: base64.b64decode(v) for n, v in content["fields"].items()}
            letter, key = DeadLetter.from_fields(fields), MessageKey(**content["key"])
        except FileNotFoundError:
            return 0  # another worker was first
        except (ValueError, KeyError, TypeError, CorruptLetter) as exc:
            # Kept for an operator to look at.
            logger.error("%s is not a letter, renamed to .broken: %r", path, exc)  # noqa: TRY400
            path.replace(path.with_suffix(".broken"))
            return 0
        try:
            save(letter, key)
        except (StoreUnavailable, OSError):
            raise
        except Exception:
            # A bug of ours, which would recur with every flush.
            logger.exception("%s cannot be stored, renamed to .broken", path)
            path.replace(path.with_suffix(".broken"))
            return 0
        with suppress(FileNotFoundError):
            path.unlink()
        return 1
