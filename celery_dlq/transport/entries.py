"""List entries of kombu's Redis transport, and the records of unacknowledged ones.

An entry is a message's envelope as JSON. A record, in the hash ``unacked``, is the JSON array of
the envelope, an exchange and a routing key. `celery_dlq` writes ``,"","queue"]`` behind the
entry's bytes: kombu reads that as an unrouted message of the queue, and nothing is decoded in
Redis. kombu's own records have a blank after each comma.

Source: ``QoS.append`` and ``QoS.restore_by_tag`` in
https://github.com/celery/kombu/blob/main/kombu/transport/redis.py
"""

from __future__ import annotations

import json
from hashlib import sha256
from typing import Any

from kombu.message import Message as BaseMessage
from kombu.transport import virtual
from kombu.utils.json import dumps, loads

from celery_dlq.headers import CONTENT_TYPE_OF_ENTRY

_BEFORE_QUEUE = b',"",'


class Entry(dict[str, Any]):
    """A fetched envelope; empty if the entry is none.

    Attributes:
        raw: The entry as it lay in the list.
        tag: Tag of this delivery.
        queue: The queue.
        error: The reason why the entry cannot be read; ``None`` if it can.
    """

    def __init__(self, raw: bytes, tag: str, queue: str) -> None:
        self.raw = raw
        self.tag = tag
        self.queue = queue
        self.error: Exception | None = None
        try:
            envelope = loads(raw.decode())
            if not isinstance(envelope, dict) or not isinstance(envelope.get("properties"), dict):
                raise TypeError("expected the JSON envelope of a kombu message")  # noqa: TRY301
        except MemoryError:
            raise
        except Exception as exc:  # noqa: BLE001 - whatever decoders raise
            self.error = exc
        else:
            super().__init__(envelope)
            self["properties"].setdefault("delivery_tag", self.identity)

    @property
    def identity(self) -> str:
        """An id that stays the same when the entry is fetched again."""
        return f"entry-{sha256(self.raw).hexdigest()[:32]}"


class EntryMessage(virtual.Message):
    """A message of a list entry; an unreadable entry becomes a message that cannot be decoded."""

    def __init__(self, payload: Any, channel: Any = None, **kwargs: Any) -> None:
        if not isinstance(payload, Entry):
            super().__init__(payload, channel=channel, **kwargs)
            return
        error = payload.error
        if error is None:
            try:
                super().__init__(payload, channel=channel, **kwargs)
            except MemoryError:
                raise
            except Exception as exc:  # noqa: BLE001 - whatever a codec raises
                error = exc
        if error is not None:
            self._raw = payload
            BaseMessage.__init__(
                self,
                body=payload.raw,
                channel=channel,
                content_type=CONTENT_TYPE_OF_ENTRY,
                content_encoding="binary",
                properties={"delivery_tag": payload.identity},
                delivery_info={"exchange": "", "routing_key": payload.queue},
                headers={},
            )
            self.errors.append((type(error), error, error.__traceback__))  # type: ignore[arg-type]
        self.delivery_tag = payload.tag


def record_end(queue: str) -> str:
    """The queue's name as it ends a record."""
    return json.dumps(queue)


def recorded(record: bytes) -> tuple[bytes, str] | None:
    """The entry and the queue of a record that this package wrote; ``None`` for kombu's."""
    cut = record.rfind(_BEFORE_QUEUE)
    if cut < 0:
        return None
    try:
        queue = json.loads(record[cut + len(_BEFORE_QUEUE) : -1])
    except ValueError:
        return None
    return (record[1:cut], queue) if isinstance(queue, str) else None


def redelivered(entry: bytes) -> tuple[bytes, Any]:
    """Mark an entry as redelivered, as kombu does; return it with its envelope.

    An entry that is no envelope stays as it is; its envelope is then ``None``.
    """
    try:
        envelope = loads(entry.decode())
        envelope["headers"]["redelivered"] = True
        envelope["properties"]["delivery_info"]["redelivered"] = True
    except (KeyError, TypeError):
        pass  # kombu, too, marks what is there
    except (ValueError, RecursionError):
        return entry, None
    return (dumps(envelope).encode(), envelope) if isinstance(envelope, dict) else (entry, None)
