"""Folders as ``dlq export`` writes them, with letters of planted causes and the truth of each."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.planted.kinds import ALONE, KINDS, ONE_OTHER, Cause, chosen, steady
from benchmarks.planted.shops import BIN, DAY, Messages, Shop, together
from benchmarks.planted.truths import (
    LEAST_OTHERS,
    Began,
    Ended,
    Flap,
    Growth,
    Hours,
    Returned,
    Truth,
    Weekday,
    of_json,
    seen_growing,
    seen_in_bursts,
    seen_in_contents,
    seen_in_time,
    wanted,
)

TRUTH = "_truth.json"
SAMPLED = 600
"""Successes of each task, where there is a sample of them."""

_SPREAD = 0.8
"""Exponent of Zipf's law."""


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What is true of one fingerprint."""

    fingerprint: str
    kind: str
    letters: int
    wanted: bool
    truths: tuple[Truth, ...]
    findable: tuple[bool, ...]
    follows: frozenset[str]
    also: frozenset[str]
    releases: tuple[str, ...]
    """All of the shop, in their order."""

    @staticmethod
    def read(folder: Path) -> dict[str, Expected]:
        found = {}
        for one in json.loads((folder / TRUTH).read_text("utf-8")):
            sets = {name: frozenset(one[name]) for name in ("follows", "also")}
            plain = {
                "truths": tuple(of_json(truth) for truth in one["truths"]),
                "findable": tuple(one["findable"]),
                "releases": tuple(one["releases"]),
            }
            found[one["fingerprint"]] = Expected(**{**one, **sets, **plain})
        return found


@dataclass
class _Drawn:
    """A cause with its letters."""

    cause: Cause
    fingerprint: str
    letters: Messages


def write(
    folder: Path, letters: int, seed: int, *, noise: bool = False, successes: bool = False
) -> dict[str, Expected]:
    """Write a folder ``letters``, one ``successes`` if it is wanted, and the truth beside them.

    Args:
        folder: Where.
        letters: How many, nearly: each cause has one at least.
        seed: Of the shop, its causes and its letters.
        noise: No cause depends on anything.
        successes: A sample of messages that succeeded is written as well.
    """
    shop = Shop(seed)
    drawn = list(_letters(shop, _causes(shop, seed, noise=noise), letters))
    good: dict[str, Messages] = {}
    if successes:
        good = {one.name: _exactly(shop, steady(one), SAMPLED) for one in shop.tasks}
    folder.mkdir(parents=True, exist_ok=True)
    _write(shop, drawn, folder / "letters", seed)
    if successes:
        parts = [_Drawn(steady(task), "", good[task.name]) for task in shop.tasks]
        _write(shop, parts, folder / "successes", seed)
    total = sum(len(one.letters.at) for one in drawn)
    found = [_expected(shop, one, drawn, good, total) for one in drawn]
    shown = [
        {
            **vars(one),
            "truths": [truth.to_json() for truth in one.truths],
            **{name: sorted(getattr(one, name)) for name in ("follows", "also")},
        }
        for one in found
    ]
    (folder / TRUTH).write_text(json.dumps(shown, indent=1) + "\n", "utf-8")
    return {one.fingerprint: one for one in found}


def _causes(shop: Shop, seed: int, *, noise: bool) -> list[Cause]:
    """Two steady causes of each busy task, and the kinds of this seed, on task after task."""
    *busy, one_other, alone = shop.tasks
    found = [steady(task) for task in busy for _ in range(2)]
    if noise:
        return [*found, *(steady(task) for task in shop.tasks for _ in range(2))]
    number = 0
    for name in chosen(seed):
        if name in {ONE_OTHER, ALONE}:
            found += KINDS[name](shop, one_other if name == ONE_OTHER else alone)
            continue
        # The last of the busy ones runs by night: there is no hour to be found.
        found += KINDS[name](shop, busy[number % (len(busy) - 1)])
        number += 1
    return found


def _letters(shop: Shop, causes: list[Cause], letters: int) -> Iterator[_Drawn]:
    sizes = 1 / np.arange(2, len(causes) + 2) ** _SPREAD
    shop.dice.shuffle(sizes)
    counts = np.maximum(1, np.round(letters * sizes / sizes.sum())).astype(int)
    for number, (cause, count) in enumerate(zip(causes, counts.tolist(), strict=True)):
        name = hashlib.sha256(f"{cause.kind} {number} {shop.begin}".encode()).hexdigest()[:16]
        yield _Drawn(cause, name, _exactly(shop, cause, count))


def _exactly(shop: Shop, cause: Cause, count: int) -> Messages:
    """So many letters of a cause: messages are drawn until as many have died."""
    weights = cause.task.load if cause.weights is None else cause.task.load * cause.weights
    parts, left, batch = [], count, 2 * count + 50
    while left > 0:
        messages = shop.messages(cause.task, weights, batch)
        cause.change(messages)
        messages = messages.where(cause.let(messages))
        share = max(len(messages.at), 1) / batch
        parts.append(messages.where(slice(0, left)))
        left -= len(parts[-1].at)
        batch = min(int(1.1 * left / share) + 50, 500_000)
    return together(parts)


def _expected(
    shop: Shop, one: _Drawn, drawn: list[_Drawn], good: dict[str, Messages], total: int
) -> Expected:
    count, cause = len(one.letters.at), one.cause
    asked = wanted(count, total)
    others = [each for each in drawn if each.cause.task is cause.task and each is not one]
    findable = tuple(
        asked and _can_be_found(shop, one, number, others, good.get(cause.task.name))
        for number in range(len(cause.truths))
    )
    return Expected(
        fingerprint=one.fingerprint,
        kind=cause.kind,
        letters=count,
        wanted=asked,
        truths=cause.truths,
        findable=findable,
        follows=cause.follows,
        also=cause.also,
        releases=tuple(shop.releases),
    )


def _can_be_found(
    shop: Shop, one: _Drawn, number: int, others: list[_Drawn], good: Messages | None
) -> bool:
    """See `benchmarks.planted.truths`."""
    several = sum(len(each.letters.at) >= LEAST_OTHERS for each in others) > 1
    if good is None and not several:
        return False
    if one.cause.holds:
        holds = one.cause.holds[number]
        side = [good] if good is not None else [each.letters for each in others]
        return seen_in_contents(
            int(holds(one.letters).sum()),
            len(one.letters.at),
            sum(int(holds(each).sum()) for each in side),
            sum(len(each.at) for each in side),
        )
    return _seen_over_time(shop, one, one.cause.truths[number])


def _seen_over_time(shop: Shop, one: _Drawn, truth: Truth) -> bool:
    times, load, count = shop.times, one.cause.task.load, len(one.letters.at)
    days = len(np.unique(one.letters.at // DAY))
    if isinstance(truth, Growth):
        sums = np.cumsum(load) / load.sum()
        places = ((one.letters.at - shop.begin) // BIN).astype(int)
        return seen_growing(sums[np.minimum(places, len(sums) - 1)].tolist())
    if isinstance(truth, Hours):
        part, enough = (times % DAY) // 3600 == truth.hour, days > 3
    elif isinstance(truth, Weekday):
        part, enough = (times // DAY + 3) % 7 == truth.day, days > 3
    elif isinstance(truth, Flap):
        part, enough = one.cause.weights > 0, seen_in_bursts(count, len(times) * BIN / 3600)
    elif isinstance(truth, Returned):
        part, enough = (times < truth.gone) | (times >= truth.at), True
    elif isinstance(truth, Began):
        part, enough = times >= truth.at, True
    else:
        assert isinstance(truth, Ended)
        part, enough = times < (truth.latest or truth.at), True
    if isinstance(truth, (Began, Ended)) and truth.release is not None:
        # A release stands out from the others if it is nearer than they are.
        near = np.abs(times - truth.at) < np.min(np.diff(shop.starts)) / 4
        enough = count * load[near & part].sum() / load[part].sum() >= 10
    return bool(enough) and seen_in_time(count, float(load[part].sum() / load.sum()))


def _write(shop: Shop, drawn: list[_Drawn], folder: Path, seed: int) -> None:
    """A file for each queue and day, as the export has them."""
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    from celery_dlq.export.partition import day_value, file_name
    from celery_dlq.export.partition import partition_folder as folder_of

    by_queue: dict[str, list[Any]] = {}
    for number, one in enumerate(drawn):
        for start in range(0, len(one.letters.at), 200_000):
            part = one.letters.where(slice(start, start + 200_000))
            table = _table(shop, one, part, np.random.default_rng((seed, number, start)))
            by_queue.setdefault(one.cause.task.queue, []).append(table)
    for queue, tables in by_queue.items():
        whole = pa.concat_tables(tables).sort_by("dead_lettered_at")
        days = pc.floor(pc.divide(pc.cast(whole["dead_lettered_at"], pa.int64()), 86_400_000_000))
        days = days.to_numpy()
        bounds = [0, *(np.flatnonzero(np.diff(days)) + 1).tolist(), len(days)]
        for first, last in pairwise(bounds):
            place = folder / folder_of(f"{queue}.dlq", day_value(int(days[first])))
            place.mkdir(parents=True, exist_ok=True)
            file = place / file_name(f"{first}-0", f"{last}-0")
            pq.write_table(
                whole.slice(first, last - first), file, compression="zstd", compression_level=1
            )


def _table(shop: Shop, one: _Drawn, letters: Messages, dice: np.random.Generator) -> Any:
    import pyarrow as pa

    from celery_dlq.export.table import schema

    task, count = one.cause.task, len(letters.at)
    if not one.fingerprint:
        error = None
    else:
        error = f"{task.name.rpartition('.')[0]}.errors.Error{one.fingerprint[:4].upper()}"
    args, kwargs = task.texts(letters)
    ids = dice.bytes(16 * count).hex()
    names = [ids[at : at + 32] for at in range(0, 32 * count, 32)]

    def of(values: list[str], codes: Any) -> Any:
        return pa.DictionaryArray.from_arrays(pa.array(codes), pa.array(values)).cast(pa.string())

    found = {
        "schema_version": [1] * count,
        "id": names,
        "task_id": names,
        "task_name": [task.name] * count,
        "source_queue": [task.queue] * count,
        "dead_letter_queue": [f"{task.queue}.dlq"] * count,
        "reason": ["failed" if error else "succeeded"] * count,
        "description": [f"{error} in {task.name}" if error else ""] * count,
        "dead_lettered_at": pa.array((letters.at * 1e6).astype(np.int64)),
        "deliveries": pa.array(dice.integers(1, 4, count)),
        "retries": pa.array(dice.integers(0, 3, count)),
        "redrives": [0] * count,
        "exception_type": [error] * count,
        "fingerprint": [one.fingerprint or None] * count,
        "headers": ["{}"] * count,
        "args_json": args,
        "kwargs_json": kwargs,
        "origin": of(shop.origins, letters.origin),
        "worker_hostname": of(shop.hosts, letters.host),
        "release": of(shop.releases, letters.release),
    }
    columns = [
        pa.nulls(count, each.type)
        if each.name not in found
        else pa.array(found[each.name], pa.string() if each.type == pa.string() else None).cast(
            each.type
        )
        for each in schema()
    ]
    return pa.Table.from_arrays(columns, schema=schema())
