"""The benchmark of planted causes judges rightly: the truth is found, and nothing else is true."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.dataset as ds
import pytest
from benchmarks.planted import asked
from benchmarks.planted.asking import by_core
from benchmarks.planted.folders import Expected, write
from benchmarks.planted.judging import Claim, Verdict, judge
from benchmarks.planted.kinds import KINDS, chosen
from benchmarks.planted.shops import Shop
from benchmarks.planted.truths import (
    Began,
    Ended,
    Flap,
    Growth,
    Hours,
    Pair,
    Range,
    Returned,
    Several,
    Truth,
    Value,
    Weekday,
)

DAY = 86_400


def said(truth: Truth) -> Claim:
    """The statement that says a truth."""
    match truth:
        case Value(feature=feature, value=value):
            return Claim("value", (feature,), (value,))
        case Several(feature=feature, values=values):
            return Claim("set", (feature,), values[:8])
        case Range(feature=feature, low=low, high=high):
            return Claim("range", (feature or "size",), low=low, high=high)
        case Pair(features=features, values=values):
            return Claim("pair", features, values)
    return said_of_time(truth)


def said_of_time(truth: Truth) -> Claim:
    match truth:
        case Hours(hour=hour):
            return Claim("hour", low=hour * 3600, high=(hour + 1) * 3600)
        case Weekday(day=day):
            return Claim("weekday", low=day * DAY, high=(day + 1) * DAY)
        case Flap() | Growth() | Returned():
            return Claim(truth.kind)
        case Began(at=at, release=None) | Ended(at=at, release=None):
            return Claim(truth.kind, at=at)
        case Began(release=release):
            return Claim("began with", values=(release,))
        case Ended(release=release):
            return Claim("mended by", values=(release,))
    raise AssertionError(truth)


@pytest.fixture(scope="module", params=[1, 2])
def planted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("planted")
    write(folder, 3_000, request.param, successes=request.param == 2)
    return folder


def test_the_truth_is_found_and_the_truth_of_others_is_false(planted: Path) -> None:
    """Of each cause; a steady one has no truth, and may have the same value by chance."""
    expected = list(Expected.read(planted).values())
    assert len(expected) > 26
    for one in expected:
        found = judge(one, map(said, one.truths))
        assert (found.found, found.false) == (sum(one.findable), 0), one
        assert found.found + found.luck == len(one.truths)
        assert judge(one, ()).found == 0
        others = {said(t) for each in expected for t in each.truths if each.kind != one.kind}
        mine = {truth.kind for truth in one.truths} | one.also
        other = {claim for claim in others if not {claim.kind, *claim.features} & one.follows}
        times = {claim for claim in other if not claim.features and claim.kind not in mine}
        assert judge(one, times).false == len(times), one


def test_most_truths_of_some_thousand_letters_can_be_found(planted: Path) -> None:
    """But for those of a task without other causes: there is nothing to compare with."""
    expected = Expected.read(planted).values()
    could = [able for one in expected for able in one.findable]
    assert sum(could) >= 0.7 * len(could) > 9


def test_two_seeds_have_every_kind() -> None:
    """And a seed always makes the same shop and the same letters."""
    assert len(KINDS) >= 20
    assert {*chosen(3), *chosen(4)} == KINDS.keys()
    one, other = Shop(5), Shop(5)
    drawn = [shop.messages(shop.tasks[0], shop.tasks[0].load, 50).at for shop in (one, other)]
    assert np.array_equal(*drawn)


def test_the_letters_have_their_truth(planted: Path) -> None:
    """The files say what the generator says, read with nothing of it."""
    table = ds.dataset(planted / "letters", format="parquet").to_table()
    rows = table.to_pylist()
    checked = 0
    for name, one in Expected.read(planted).items():
        mine = [row for row in rows if row["fingerprint"] == name]
        assert len(mine) == one.letters
        for truth in one.truths:
            if isinstance(truth, Value) and truth.value is not None:
                having = sum(truth.value in shown(row) for row in mine)
                assert having >= len(mine) / len(one.truths) / 2, one
                checked += 1
            if isinstance(truth, Began):
                first = min(row["dead_lettered_at"] for row in mine).timestamp()
                assert first >= truth.at
    assert checked > 3


def shown(row: dict[str, Any]) -> set[str]:
    """All texts and numbers in a letter."""

    def leaves(value: Any) -> Iterator[str]:
        if isinstance(value, (dict, list)):
            for part in value.values() if isinstance(value, dict) else value:
                yield from leaves(part)
        else:
            yield value if isinstance(value, str) else json.dumps(value)

    whole = [json.loads(row["args_json"]), json.loads(row["kwargs_json"])]
    return {*leaves(whole), row["worker_hostname"], row["origin"]}


def test_a_wrong_release_is_false(planted: Path) -> None:
    """For a cause that began without one, and for one that another began."""
    for one in Expected.read(planted).values():
        steady = replace(one, truths=(), findable=(), follows=frozenset(), also=frozenset())
        for kind in ("began with", "mended by"):
            assert judge(steady, [Claim(kind, values=(one.releases[0],))]).false == 1
        assert judge(steady, [Claim("value", ("release",), (one.releases[-1],))]).false == 1


@pytest.mark.parametrize("noise", [False, True], ids=["planted", "noise"])
def test_causes_are_found_and_nothing_else(noise: bool, tmp_path: Path) -> None:
    """Two shops: nearly all that can be found is, and one statement of a hundred may be false."""
    found = Verdict()
    for seed in (31, 32):
        for _kind, verdict in asked(3_000, seed, by_core, noise=noise)[1]:
            found.add(verdict)
    assert found.causes > 40
    assert found.false <= 1, found.examples
    assert found.found >= 0.9 * found.findable, found.examples
    assert noise or found.findable > 20
