"""Names of folders and files: Hive partitions that every reader interprets alike."""

from __future__ import annotations

import re
from datetime import date, timedelta
from hashlib import sha256
from typing import NamedTuple
from urllib.parse import quote

NO_VALUE = "__HIVE_DEFAULT_PARTITION__"
"""The value of a partition without one: Hive, Spark, DuckDB and Arrow read it as null."""

MICROSECONDS_A_DAY = 86_400_000_000

_EPOCH = date(1970, 1, 1)
_FIRST_DAY, _LAST_DAY = (date.min - _EPOCH).days, (date.max - _EPOCH).days
_MAX_COMPONENT_BYTES = 180  # file systems allow 255, prefix and suffix included
_UNSAFE = "\"#%'*/:=?\\\x7f{[]^"  # exactly the characters that Spark escapes and decodes
_SPACE = 0x20
# What readers parse as a number, a date or a time; and words that they parse as other types.
_TYPED = re.compile(r"(?=.*\d)[\d\s+\-.:_,eEdDfFlLtTzZxXpPa-fA-F]*")
_TYPED_WORDS = frozenset({"nan", "inf", "infinity", "true", "false", "null", "none", "epoch"})


def partition_folder(dead_letter_queue: str, day: str) -> str:
    """The folder of one queue and day, relative to the destination."""
    return f"{queue_folder(dead_letter_queue)}/day={day}"


def queue_folder(dead_letter_queue: str) -> str:
    """The folder of one queue, relative to the destination."""
    return f"dlq={queue_value(dead_letter_queue)}"


def queue_value(name: str) -> str:
    """The value of the partition ``dlq``.

    Readers infer a partition's type from its values: a queue ``007`` would become the number 7.
    Such a name gets the suffix ``~``, so that the column is always text. The column
    ``dead_letter_queue`` in the files has the exact name.
    """
    if not name:
        return NO_VALUE
    core = name.rstrip("~")
    typed = _TYPED.fullmatch(core) is not None or core.lower().strip("+- ") in _TYPED_WORDS
    return _short_name(escaped(f"{name}~" if typed or name == NO_VALUE else name))


def escaped(name: str) -> str:
    """Escape a partition value as Spark does: readers decode only these; non-ASCII stays raw."""
    return "".join(
        f"%{ord(character):02X}" if character in _UNSAFE or ord(character) < _SPACE else character
        for character in name
    )


def day_value(day_number: int | None) -> str:
    """The value of the partition ``day``, from the number of days since 1970 in UTC.

    Days outside of the years 1 to 9999 get `NO_VALUE`: one odd date would make readers treat
    all days as text.
    """
    if day_number is None or not _FIRST_DAY <= day_number <= _LAST_DAY:
        return NO_VALUE
    return (_EPOCH + timedelta(days=day_number)).isoformat()


def file_name(after: str | None, last: str, generation: int = 0) -> str:
    """The name of a file, from the range of positions of its letters and their generation."""
    mark = f"g{generation}-" if generation else ""
    return f"letters-{mark}{after or '0-0'}-{last}.parquet"


class HeldRange(NamedTuple):
    """What a file holds: positions after the first one up to the last, of a generation."""

    generation: int
    after: str
    last: str


def range_of(name: str) -> HeldRange | None:
    """The range of a file; ``None``: not our file."""
    found = re.fullmatch(r"letters-(?:g(\d+)-)?(\d+-\d+)-(\d+-\d+)\.parquet", name)
    return HeldRange(int(found[1] or 0), found[2], found[3]) if found else None


def note_name(dead_letter_queue: str) -> str:
    """The name of a queue's checkpoint."""
    return f"{_short_name(quote(dead_letter_queue, safe=''))}.json"


def _short_name(component: str) -> str:
    encoded = component.encode("utf-8", "surrogatepass")
    if len(encoded) <= _MAX_COMPONENT_BYTES:
        return component
    return f"{encoded[:140].decode('utf-8', 'ignore')}~{sha256(encoded).hexdigest()[:16]}"
