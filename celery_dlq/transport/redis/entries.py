"""List entries of kombu's Redis transport: read, recorded as unacknowledged, and written.

An entry is a message's envelope as JSON. A record, in the hash ``unacked``, is the JSON array of
the envelope, an exchange and a routing key. `celery_dlq` writes ``,"","queue"]`` behind the
entry's bytes: kombu reads that as an unrouted message of the queue, and nothing is decoded in
Redis. kombu's own records have a blank after each comma.

Source: ``QoS.append`` and ``QoS.restore_by_tag`` in
https://github.com/celery/kombu/blob/main/kombu/transport/redis.py
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from hashlib import sha256
from typing import Any, cast

from kombu.message import Message as BaseMessage
from kombu.transport import virtual
from kombu.utils.encoding import bytes_to_str
from kombu.utils.json import dumps, object_hook

from celery_dlq.letters.headers import CONTENT_TYPE_OF_ENTRY

_BEFORE_QUEUE = b',"",'
_USUAL_LISTS = "\x06\x16", [0, 3, 6, 9]  # kombu's `sep` and `priority_steps`
_BEFORE_LISTS = "-["
# As kombu's `loads`, which makes a decoder for each text
_decode = json.JSONDecoder(object_hook=object_hook).decode


class FetchedEntry(dict[str, Any]):
    """A fetched envelope; empty if the entry is none."""

    def __init__(self, raw: bytes, tag: str, queue: str) -> None:
        self.raw = raw
        self.tag = tag
        self.queue = queue
        self.error: Exception | None = None
        try:
            super().__init__(_envelope(raw))
        except MemoryError:
            raise
        except Exception as exc:  # noqa: BLE001 - whatever decoders raise
            self.error = exc


class EntryMessage(virtual.Message):
    """A message of a list entry; an unreadable entry becomes a message that cannot be decoded."""

    def __init__(self, payload: Any, channel: Any = None, **kwargs: Any) -> None:
        self.dlq_entry: FetchedEntry | None = payload if isinstance(payload, FetchedEntry) else None
        if not isinstance(payload, FetchedEntry):
            super().__init__(payload, channel=channel, **kwargs)
            return
        error = payload.error
        if error is None:
            try:
                if not isinstance(payload.get("body") or "", str):
                    raise TypeError("expected a body that is a text")  # noqa: TRY301
                super().__init__(payload, channel=channel, **kwargs)
            except MemoryError:
                raise
            except Exception as exc:  # noqa: BLE001 - whatever a codec raises
                error = exc
        if error is not None:
            self._be_the_entry(payload, channel)
            self.errors.append((type(error), error, error.__traceback__))  # type: ignore[arg-type]
        self.delivery_tag = payload.tag

    def dlq_keep_bytes(self) -> bool:
        """Become the whole entry if its body is more than what was decoded of it.

        kombu ignores characters that are no base64.
        """
        entry: Any = self.dlq_entry
        if entry is None or self.body is entry.raw:
            return False
        body, encoding = entry.get("body") or "", entry["properties"].get("body_encoding")
        again = body
        if body:
            again, _ = self.channel.encode_body(self.channel.decode_body(body, encoding), encoding)
        if again == body and self.content_type != CONTENT_TYPE_OF_ENTRY:
            return False
        tag = self.delivery_tag
        self._be_the_entry(entry, self.channel)
        self.delivery_tag = tag
        return True

    def _be_the_entry(self, entry: FetchedEntry, channel: Any) -> None:
        BaseMessage.__init__(
            self,
            body=entry.raw,
            channel=channel,
            content_type=CONTENT_TYPE_OF_ENTRY,
            content_encoding="binary",
            properties={"delivery_tag": _identity(entry.raw)},
            delivery_info={"exchange": "", "routing_key": entry.queue},
            headers={},
        )


def record_end(queue: str) -> str:
    """The queue's name as it ends a record."""
    return json.dumps(queue)


def tag_end(sep: str, steps: Sequence[int]) -> str:
    """What a delivery tag ends with: how its app names lists, if not as kombu usually does.

    A worker of another app that restores the message learns it from there.
    """
    lists = sep, list(steps)
    return "" if lists == _USUAL_LISTS else f"-{json.dumps(lists)}"


def lists_of(tag: str) -> tuple[str, Sequence[int]]:
    """The ``sep`` and ``priority_steps`` of the app whose worker made a delivery tag."""
    _, found, lists = tag.partition(_BEFORE_LISTS)
    if not found:
        return _USUAL_LISTS
    sep, steps = json.loads(f"[{lists}")
    return sep, steps


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


def redelivered(entry: bytes, decode_body: Callable[..., Any]) -> tuple[bytes, Any]:
    """Mark an entry as redelivered, as kombu does; return it with its envelope.

    An entry that is no message stays as it is, so that it is the same letter after each delivery;
    its envelope is then ``None``.
    """
    try:
        envelope = _envelope(entry)
        properties, headers = envelope["properties"], envelope.get("headers")
        if envelope.get("body"):
            decode_body(envelope["body"], properties.get("body_encoding"))
        if headers or isinstance(headers, dict):  # kombu takes what is false for none
            headers["redelivered"] = True
        properties["delivery_info"]["redelivered"] = True
        return dumps(envelope).encode(), envelope
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001 - whatever decoders raise
        return entry, None


def _envelope(entry: bytes) -> dict[str, Any]:
    """The envelope of an entry, with an id; raises if kombu cannot make a message of it."""
    envelope = _decode(bytes_to_str(entry))  # which replaces what is no UTF-8
    try:
        properties = envelope["properties"]
        for name in ("exchange", "routing_key"):
            properties["delivery_info"][name]
    except (LookupError, TypeError) as exc:
        raise TypeError(
            "expected a kombu message: a JSON object with properties.delivery_info.routing_key "
            "and exchange"
        ) from exc
    if "delivery_tag" not in properties:
        properties["delivery_tag"] = _identity(entry)
    return cast("dict[str, Any]", envelope)


def _identity(entry: bytes) -> str:
    """An id that stays the same when the entry is fetched again."""
    return f"entry-{sha256(entry).hexdigest()[:32]}"


def priority_of(channel: Any, envelope: Any) -> int:
    """The priority of an envelope, as kombu reads it."""
    try:
        priority = int(envelope["properties"]["priority"])
    except (TypeError, ValueError, KeyError):
        return int(channel.default_priority)
    return int(max(min(priority, channel.max_priority), channel.min_priority))


def end_of_list(channel: Any, priority: int) -> str:
    """What follows a queue's name in the key of its list for a priority, as kombu writes it."""
    step = channel.priority(priority)
    return f"{channel.sep}{step}" if step else ""
