"""Names of folders and files: Hive partitions that every reader takes for what they are."""

from __future__ import annotations

import re
from datetime import date, timedelta
from hashlib import sha256
from urllib.parse import quote

NO_VALUE = "__HIVE_DEFAULT_PARTITION__"
"""How Hive, Spark, DuckDB and Arrow write a partition without a value: they read null."""

MICROSECONDS_A_DAY = 86_400_000_000

_EPOCH = date(1970, 1, 1)
_FIRST_DAY, _LAST_DAY = (date.min - _EPOCH).days, (date.max - _EPOCH).days
_MOST_BYTES = 180  # of a component; file systems take 255, with what we add to it
_UNSAFE = "\"#%'*/:=?\\\x7f{[]^"  # what Spark escapes, and all that it reads back
_SPACE = 0x20
# What readers take for a number, a date or a time; beside these the words of `_TYPED_WORDS`.
_TYPED = re.compile(r"(?=.*\d)[\d\s+\-.:_,eEdDfFlLtTzZxXpPa-fA-F]*")
_TYPED_WORDS = frozenset({"nan", "inf", "infinity", "true", "false", "null", "none"})


def folder(dead_letter_queue: str, day: str) -> str:
    """The folder of one queue and day, relative to the destination."""
    return f"{queue_folder(dead_letter_queue)}/day={day}"


def queue_folder(dead_letter_queue: str) -> str:
    """The folder of one queue, relative to the destination."""
    return f"dlq={queue_value(dead_letter_queue)}"


def queue_value(name: str) -> str:
    """The value of the partition ``dlq``.

    Readers guess a partition's type from its values: a queue ``007`` would become the number 7.
    Such a name gets a ``~`` at its end, so that the column is text whatever the queues are
    called. The column ``dead_letter_queue`` in the files has the name itself.
    """
    if not name:
        return NO_VALUE
    core = name.rstrip("~")
    typed = _TYPED.fullmatch(core) is not None or core.lower().strip("+-") in _TYPED_WORDS
    return _short(escaped(f"{name}~" if typed or name == NO_VALUE else name))


def escaped(name: str) -> str:
    """A partition value as Spark writes it: it decodes just these, and non-ASCII stays raw."""
    return "".join(
        f"%{ord(character):02X}" if character in _UNSAFE or ord(character) < _SPACE else character
        for character in name
    )


def day_value(day_number: int | None) -> str:
    """The value of the partition ``day`` of a day since 1970, in UTC.

    Days that no calendar of four digits has are without a value: one odd date would make
    readers take all days for text.
    """
    if day_number is None or not _FIRST_DAY <= day_number <= _LAST_DAY:
        return NO_VALUE
    return (_EPOCH + timedelta(days=day_number)).isoformat()


def file_name(after: str | None, last: str) -> str:
    """The name of a file, from the range of positions whose letters it holds."""
    return f"letters-{after or '0-0'}-{last}.parquet"


def range_of(name: str) -> tuple[str, str] | None:
    """The positions after which and until which a file holds letters; ``None``: not our file."""
    found = re.fullmatch(r"letters-(\d+-\d+)-(\d+-\d+)\.parquet", name)
    return (found[1], found[2]) if found else None


def note_name(dead_letter_queue: str) -> str:
    """The name of a queue's checkpoint."""
    return f"{_short(quote(dead_letter_queue, safe=''))}.json"


def _short(component: str) -> str:
    encoded = component.encode("utf-8", "surrogatepass")
    if len(encoded) <= _MOST_BYTES:
        return component
    return f"{encoded[:140].decode('utf-8', 'ignore')}~{sha256(encoded).hexdigest()[:16]}"
