"""A summary of each day beside its files: the triage of a year reads small tables and the new day.

::

    _celery_dlq/summaries/place=<folder of a queue and day>/part-….orc

A summary has three kinds of rows (``kept``), with columns of letters:

- ``hour``: a row stands for letters of one hour that are equal in `_OF_HOUR`. ``stands_for`` says
  for how many, ``first_at`` is the time of the first one, all else is of the newest one.
- ``day``: the same of the whole day, by host and deliveries as well, which few questions ask for.
- ``letter``: the letters of each cause with the smallest hashes of their ids, `MOST_KEPT` at most.
  Of several days together these hold the smallest of all: a triage looks at the same letters with
  summaries and without, and at fewer where nearly all letters are of one day.

So a folder is its summaries, and the letters of folders without one. A summary belongs to a folder
whose files have the names, sizes and times of change that they had (``stamp``). If a file is new,
changed or gone, the summary of its folder is made anew; if all are gone, its letters go from there
as well. The last day of each queue has none: it still changes.

Nothing is in a summary that is not in the files: what they have redacted is redacted. They are not
Parquet, so that nobody's pattern of Parquet files finds them. Spark replaces the summary of a
folder, which is one file, when the job that wrote it has ended.
"""

from __future__ import annotations

import re
import shutil
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from celery_dlq.letters.comparison import MAX_ARGUMENTS_CHARS
from celery_dlq.letters.printable import get_logger
from celery_dlq.spark.triage import questions, samples
from celery_dlq.spark.triage.selection import EVERYTHING, Selection, is_remote
from celery_dlq.spark.triage.trends import run_sql
from celery_dlq.spark.triage.unreadable import first_line, java_errors

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

logger = get_logger("celery_dlq.spark")

LEAST_DAYS = 8
"""Days with letters, from which on summaries are made; fewer are counted by less than an hour."""

LEAST_BYTES = 1024 * 1024 * 1024
"""Of files: ten million letters and less are read as fast as their summaries."""

MOST_KEPT = 500
"""Letters of a cause and day that are kept to be looked at."""

SUMMARIES = "_celery_dlq/summaries"
"""The folder of the summaries."""

_KILLED_SECONDS = 86_400.0  # no triage writes so long
_GONE = "gone"  # the stamp of a folder that was removed
_FOLDER = r"(dlq=[^/]+/day=[^/]+)/[^/]+$"
_COLUMNS = tuple(dict.fromkeys([*questions.COLUMNS, *samples.COLUMNS]))
_OF_HOUR = (
    *("fingerprint", "task_name", "source_queue", "dead_letter_queue", "reason"),
    *("exception_type", "release"),
)
_OF_DAY = (*_OF_HOUR, "worker_hostname", "deliveries")
_NEWEST = ("id", "description", "exception_message", "dead_lettered_at")
_TEXTS = ("description", "exception_message")
_DDL = (
    f"{questions.column_ddl(_COLUMNS)}, "
    "stands_for BIGINT, first_at TIMESTAMP, kept STRING, stamp STRING, place STRING"
)
_TYPES = tuple(_DDL.split(", ")[:-2])
_NOTHING = {name: f"CAST(NULL AS {kind})" for name, kind in (one.split(" ") for one in _TYPES)}
_HOUR = "floor(unix_micros(dead_lettered_at) / 3600e6D)"
# What makes a summary another one, for the same files.
_VERSION = sha256(f"3 {_DDL} {_OF_HOUR} {_OF_DAY} {MOST_KEPT}".encode()).hexdigest()[:8]

_LISTED = """
    SELECT IF(size(filter(split(regexp_replace(path, '^[^/]+:', ''), '/'), x -> x <> '')) = {depth},
              regexp_extract(path, '{folder}', 1), '') AS place,
           collect_list(concat(regexp_extract(path, '[^/]+$', 0), ' ', length, ' ',
                               unix_millis(modificationTime))) AS files
    FROM {{letters}} GROUP BY 1
"""
_COUNTED = """
    SELECT COLUMNS, stands_for, first_at, 'KEPT' AS kept, stamp, place
    FROM (SELECT place, stamp, EQUAL, count(*) AS stands_for,
                 min(dead_lettered_at) AS first_at,
                 max_by(struct(NEWEST), struct(dead_lettered_at, coalesce(id, ''))) AS newest
          FROM {letters}
          GROUP BY place, stamp, EQUAL, PERIOD)
"""
_DRAWN = """
    SELECT COLUMNS, 0L AS stands_for, dead_lettered_at AS first_at, 'letter' AS kept, stamp,
           letters.place AS place
    FROM {letters} AS letters JOIN {sizes} AS sizes
      ON letters.place = sizes.place AND letters.fingerprint <=> sizes.fingerprint
    WHERE DRAW < least(4294967296D, 4294967296D * MOST_KEPT / sizes.letters)
"""


def summarized(
    spark: SparkSession,
    path: Path | str,
    selection: Selection = EVERYTHING,
    *,
    always: bool = False,
) -> DataFrame:
    """Read the letters of a folder as their summaries, and as they are where there is none.

    Summaries that lack are made first, and kept in the folder. A folder that cannot be written is
    read without them, which the log says in one line; a small one, or a part of its time, as well.

    Args:
        spark: The session that reads.
        path: The folder, or a URL that Spark reads.
        selection: Which letters.
        always: Also of files of less than `LEAST_BYTES`.

    Returns:
        The columns of `questions.COLUMNS` and `samples.COLUMNS`. With summaries also
        ``stands_for``, ``first_at`` and ``kept``, which the questions of a triage understand.
    """
    files = {} if selection.in_time else _folder_files(spark, path, selection)
    stamps = {
        place: _VERSION + sha256("\n".join([place, *sorted(names)]).encode()).hexdigest()[:24]
        for place, names in files.items()
    }
    size = sum(int(name.rsplit(" ", 2)[1]) for names in files.values() for name in names)
    days = len({place.rpartition("/")[2] for place in stamps})
    few = days < LEAST_DAYS or (size < LEAST_BYTES and not always)
    closed = {} if few else _closed_folders(stamps)
    # A folder that has become small may have summaries of what is gone.
    known = _known_stamps(spark, path) if closed or (stamps and not selection) else {}
    wanting = {place: stamp for place, stamp in closed.items() if known.get(place) != stamp}
    gone = [place for place in known if place not in stamps] if not selection else []
    if wanting or gone:
        try:
            _write_summaries(spark, path, wanting, gone)
        except _unwritable() as exc:
            logger.warning(
                "%s is read without summaries of its days, which could not be kept there: %s",
                path,
                first_line(str(exc)) or type(exc).__name__,
            )
            return questions.scan(spark, path, selection).select(*_COLUMNS)
        known = _known_stamps(spark, path)
    if not closed:
        return questions.scan(spark, path, selection).select(*_COLUMNS)
    summed = {place: stamp for place, stamp in closed.items() if known.get(place) == stamp}
    rest = [place for place in stamps if place not in summed]
    return _together(spark, path, summed, rest, selection)


def _together(
    spark: SparkSession,
    path: Path | str,
    summed: Mapping[str, str],
    rest: Iterable[str],
    selection: Selection,
) -> DataFrame:
    """The summaries of some folders, and the letters of others."""
    # A stamp is of one place.
    valid = spark.createDataFrame([(stamp,) for stamp in summed.values()], "stamp STRING")
    kept = _kept_summaries(spark, path).join(valid.hint("broadcast"), "stamp", "left_semi")
    found = selection.select_from(kept).select(*_COLUMNS, "stands_for", "first_at", "kept")
    places = [_path_below(path, place) for place in rest]
    if not places:
        return found
    letters = selection.select_from(questions.files_of(spark, places)).selectExpr(
        *_COLUMNS, "1L AS stands_for", "dead_lettered_at AS first_at", "'letter' AS kept"
    )
    return found.unionByName(letters)


def _folder_files(
    spark: SparkSession, path: Path | str, selection: Selection
) -> dict[str, list[str]]:
    """The folders of queues and days, each with the names, sizes and times of its files.

    No file is opened. Nothing if there are files elsewhere, which nobody knows the days of.
    """
    files: dict[str, list[str]] = defaultdict(list)
    if is_remote(path):
        reader = spark.read.format("binaryFile").option("recursiveFileLookup", "true")
        listed = reader.option("pathGlobFilter", "*.parquet").load(str(path))
        depth = len(list(filter(None, re.sub("^[^/]+:", "", str(path)).split("/")))) + 3
        files.update(run_sql(_LISTED.format(folder=_FOLDER, depth=depth), listed).collect())
    else:
        for file in questions.files_in(Path(path)):
            found = re.fullmatch(_FOLDER, file.relative_to(path).as_posix())
            now = file.stat()
            changed = now.st_mtime_ns // 1_000_000
            files[found[1] if found else ""].append(f"{file.name} {now.st_size} {changed}")
    return {
        place: names
        for place, names in files.items()
        if "" not in files and all(map(selection.may_have, place.split("/")))
    }


def _closed_folders(stamps: Mapping[str, str]) -> dict[str, str]:
    """The folders but for the last day of each queue."""
    last: dict[str, str] = {}
    for place in sorted(stamps):
        last[place.partition("/")[0]] = place
    return {place: stamp for place, stamp in stamps.items() if place not in last.values()}


def _kept_summaries(spark: SparkSession, path: Path | str) -> DataFrame:
    # A path with [, * or { is not a pattern.
    return (
        spark.read.option("__globPaths__", "false").schema(_DDL).orc(_path_below(path, SUMMARIES))
    )


def _known_stamps(spark: SparkSession, path: Path | str) -> dict[str, str]:
    """The stamps of the summaries that there are."""
    from pyspark.errors import AnalysisException  # noqa: PLC0415 - imported when used

    if not is_remote(path) and not Path(path, SUMMARIES).exists():
        return {}
    try:
        found = _kept_summaries(spark, path).groupBy("place").agg({"stamp": "max"}).collect()
    except AnalysisException:  # there is no such folder yet
        return {}
    return {place: stamp for place, stamp in found if stamp != _GONE}


def _write_summaries(
    spark: SparkSession, path: Path | str, wanting: Mapping[str, str], gone: Iterable[str]
) -> None:
    """Make the summaries of some folders; of those that are gone, empty ones."""
    if not is_remote(path):
        _forget_killed(Path(path, SUMMARIES))
    empty = [(_GONE, place) for place in gone]
    found = spark.createDataFrame(empty, "stamp STRING, place STRING").selectExpr(
        *(f"{nothing} AS {name}" for name, nothing in _NOTHING.items()),
        "stamp",
        "place",
    )
    if wanting:
        letters = _with_places(spark, path, wanting)
        found = found.unionByName(run_sql(_counted("hour", _OF_HOUR, _HOUR), letters))
        found = found.unionByName(run_sql(_counted("day", _OF_DAY, "place"), letters))
        sizes = letters.groupBy("place", "fingerprint").count()
        sizes = sizes.withColumnRenamed("count", "letters").hint("broadcast")
        found = found.unionByName(run_sql(_drawn_sql(), letters, sizes=sizes))
    writer = found.repartition("place").write.partitionBy("place").mode("overwrite")
    writer.option("partitionOverwriteMode", "dynamic").orc(_path_below(path, SUMMARIES))


def _forget_killed(folder: Path) -> None:
    """Remove what triages that were killed had begun to write, with arguments of letters."""
    for begun in folder.glob(".spark-staging-*"):
        with suppress(OSError):
            if time.time() - begun.stat().st_mtime > _KILLED_SECONDS:
                shutil.rmtree(begun)


def _with_places(spark: SparkSession, path: Path | str, wanting: Mapping[str, str]) -> DataFrame:
    """The letters of some folders, each with its folder and the stamp of it."""
    letters = questions.files_of(spark, [_path_below(path, place) for place in wanting])
    # A URL, in which a plus is a plus.
    at = "url_decode(replace(_metadata.file_path, '+', '%2B'))"
    letters = letters.selectExpr(*_COLUMNS, f"regexp_extract({at}, '{_FOLDER}', 1) AS place")
    stamps = spark.createDataFrame(list(wanting.items()), "place STRING, stamp STRING")
    return letters.join(stamps.hint("broadcast"), "place")


def _counted(kept: str, equal: Sequence[str], period: str) -> str:
    newest = {name: f"newest.{name}" for name in _NEWEST}
    columns = [
        newest.get(name, name if name in equal else f"{_NOTHING[name]} AS {name}")
        for name in _COLUMNS
    ]
    return (
        _COUNTED.replace("COLUMNS", ", ".join(columns))
        .replace("EQUAL", ", ".join(equal))
        .replace("NEWEST", ", ".join(_NEWEST))
        .replace("KEPT", kept)
        .replace("PERIOD", period)
    )


def _drawn_sql() -> str:
    columns = {name: name for name in _COLUMNS} | {"fingerprint": "letters.fingerprint"}
    columns |= {name: _NOTHING[name] for name in _TEXTS}
    columns |= {
        name: f"IF(length({name}) > {MAX_ARGUMENTS_CHARS}, 'too large', {name})"
        for name in ("args_json", "kwargs_json")
    }
    return (
        _DRAWN.replace("COLUMNS", ", ".join(f"{one} AS {name}" for name, one in columns.items()))
        .replace("DRAW ", f"{samples.DRAW} ")
        .replace("MOST_KEPT", str(samples.most_drawn(MOST_KEPT)))
    )


def _path_below(path: Path | str, place: str) -> str:
    root = str(path).rstrip("/") if is_remote(path) else f"file://{Path(path).resolve()}"
    return f"{root}/{place}"


def _unwritable() -> tuple[type[Exception], ...]:
    """What Spark raises if it cannot write."""
    from pyspark.errors import PySparkException  # noqa: PLC0415 - imported when used

    return (PySparkException, *java_errors(), OSError)
