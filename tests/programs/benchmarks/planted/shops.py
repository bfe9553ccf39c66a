"""Made-up businesses: their tasks, arguments, hosts, releases and hours, all by a seed.

Nothing here depends on a cause. A letter of a cause is a message of its task that the cause let
through, and a success is a message of the task.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

HOUR, DAY = 3600, 86_400
BIN = 600
"""Seconds for which the load of a task is one number."""

Numbers = Any
"""An array of numpy's."""

_TRADES = (
    {
        "app": "shop",
        "tasks": ("charge", "refund", "ship", "invoice", "restock", "notify", "audit", "feed"),
        "tenant": ("tenant", "t-{:03d}"),
        "user": ("user_id", "{}"),
        "amount": ("amount", 1, 12_000, 0),
        "first": ("currency", ("EUR", "USD", "GBP", "CHF", "SEK")),
        "second": ("provider", ("firstpay", "midpay", "lastpay", "bankwire")),
        "deep": (("customer", "kind"), ("private", "business", "public")),
        "deeper": (("order", "ship", "country"), ("DE", "FR", "IT", "ES", "NL", "PL", "CH", "AT")),
        "library": (("client", "sdk"), ("3.1.0", "3.1.1", "3.2.0", "4.0.0", "4.0.1", "4.1.0")),
        "size": "bytes",
        "optional": ("coupon", ("SPRING", "FRIENDS", "VIP")),
        "tags": ("tags", ("gift", "express", "fragile", "b2b", "promo", "repeat")),
        "flag": "dry_run",
        "releases": "v{}",
        "hosts": "celery@{pool}-{number}",
    },
    {
        "app": "fleet.jobs",
        "tasks": ("route", "track", "bill", "weigh", "geocode", "predict", "archive", "sync_depot"),
        "tenant": ("carrier", "carrier_{}"),
        "user": ("vehicle", "VIN{:08d}"),
        "amount": ("weight_kg", 100, 4_000_000, 2),
        "first": ("unit", ("truck", "van", "bike", "drone")),
        "second": ("engine", ("osrm", "valhalla", "here", "maps", "own")),
        "deep": (("depot", "zone"), ("north", "south", "east", "west", "harbour")),
        "deeper": (("trip", "goal", "region"), ("r1", "r2", "r3", "r4", "r5", "r6", "r7")),
        "library": (("device", "firmware"), ("1.9", "2.0", "2.1", "2.2", "3.0-beta")),
        "size": "points",
        "optional": ("reroute_of", ("customer", "weather", "jam")),
        "tags": ("stops", ("dock", "street", "locker", "yard", "customs", "ferry")),
        "flag": "night",
        "releases": "2026.{}.0",
        "hosts": "worker@{pool}{number:02d}.fleet.internal",
    },
    {
        "app": "media",
        "tasks": ("transcode", "thumb", "caption", "publish", "scan", "rate", "purge", "report"),
        "tenant": ("channel", "{}"),
        "user": ("upload", "up-{:x}"),
        "amount": ("duration_ms", 500, 900_000, 0),
        "first": ("codec", ("h264", "hevc", "av1", "vp9", "prores", "mjpeg")),
        "second": ("preset", ("fast", "medium", "slow", "archive")),
        "deep": (("source", "container"), ("mp4", "mov", "mkv", "avi")),
        "deeper": (("target", "cdn", "edge"), ("fra", "ams", "lhr", "iad", "sfo", "nrt", "syd")),
        "library": (("meta", "encoder"), ("x-1.4.2", "x-1.4.3", "x-1.5.0", "x-2.0.0")),
        "size": "frames",
        "optional": ("watermark", ("logo", "text")),
        "tags": ("filters", ("denoise", "crop", "hdr", "subtitle", "speed", "loop")),
        "flag": "live",
        "releases": "build-7{:02d}",
        "hosts": "{pool}-{number}@k8s",
    },
)  # fmt: skip


@dataclass(frozen=True)
class Argument:
    """A place in the arguments, and how its values are drawn: as codes that `text` writes."""

    path: tuple[str | int, ...]
    draw: Callable[[np.random.Generator, Numbers], Numbers]
    text: Callable[[Numbers], list[str]]

    @property
    def feature(self) -> str:
        first, *rest = self.path
        named = f"{first}[{rest[0]}]" if isinstance(rest[0], int) else f"{first}.{rest[0]}"
        return ".".join([named, *map(str, rest[1:])])

    def value(self, code: int) -> str:
        """A value as people read it."""
        found = json.loads(self.text(np.array([code]))[0])
        return found if isinstance(found, str) else self.text(np.array([code]))[0]


def choice(path: tuple[str | int, ...], values: Sequence[str], weights: Numbers) -> Argument:
    texts = np.array([json.dumps(value) for value in values], object)
    share = np.cumsum(weights / np.sum(weights))
    return Argument(
        path,
        lambda dice, at: np.minimum(np.searchsorted(share, dice.random(len(at))), len(texts) - 1),
        lambda codes: texts[codes].tolist(),
    )


@dataclass(frozen=True)
class Task:
    """A task: its queue, its arguments by what they are for, and its load in each `BIN`."""

    name: str
    queue: str
    pool: int
    arguments: dict[str, Argument]
    optional: Argument
    load: Numbers
    grows: frozenset[str]
    """Features that follow from the time."""

    def texts(self, messages: Messages) -> tuple[list[str], list[str]]:
        """The arguments as JSON: args and kwargs."""
        tree: dict[str, Any] = {"args": {}, "kwargs": {}}
        roles = list(self.arguments)
        for role in roles:
            node = tree
            *above, last = self.arguments[role].path
            for name in above:
                node = node.setdefault(name, {})
            node[last] = f"\0{role}\0"
        columns = {role: self.arguments[role].text(messages.codes[role]) for role in roles}
        args = json.dumps([tree["args"][place] for place in sorted(tree["args"])])
        given = self.optional
        kwargs = json.dumps(tree["kwargs"])[:-1]
        comma = ", " if tree["kwargs"] else ""
        last = [
            f'{comma}"{given.path[-1]}": {text}}}' if code >= 0 else "}"
            for code, text in zip(
                messages.codes["optional"].tolist(),
                given.text(messages.codes["optional"]),
                strict=True,
            )
        ]
        count = len(messages.at)
        return (
            _filled(args, columns, count),
            [a + b for a, b in zip(_filled(kwargs, columns, count), last, strict=True)],
        )


def _filled(template: str, columns: dict[str, list[str]], count: int) -> list[str]:
    """The template for each message, with its values."""
    order = []
    for part in template.split('"\\u0000')[1:]:
        order.append(part.partition("\\u0000")[0])
    text = template.replace("%", "%%")
    for role in order:
        text = text.replace(f'"\\u0000{role}\\u0000"', "%s", 1)
    if not order:
        return [text % ()] * count
    return [text % row for row in zip(*(columns[role] for role in order), strict=True)]


@dataclass
class Messages:
    """Messages of a task as columns."""

    at: Numbers
    host: Numbers
    release: Numbers
    origin: Numbers
    codes: dict[str, Numbers] = field(default_factory=dict)

    def where(self, chosen: Numbers) -> Messages:
        columns = (self.at, self.host, self.release, self.origin)
        return Messages(
            *(one[chosen] for one in columns), {k: one[chosen] for k, one in self.codes.items()}
        )


def together(parts: Sequence[Messages]) -> Messages:
    def joined(name: str) -> Numbers:
        return np.concatenate([getattr(one, name) for one in parts])

    codes = {role: np.concatenate([one.codes[role] for one in parts]) for role in parts[0].codes}
    return Messages(*map(joined, ("at", "host", "release", "origin")), codes)


class Shop:
    """A business of its own: everything in it follows from the seed."""

    def __init__(self, seed: int) -> None:
        self.dice = np.random.default_rng(seed)
        dice = self.dice
        self.trade: dict[str, Any] = _TRADES[seed % len(_TRADES)]
        self.days = int(dice.choice([7, 14, 21, 28, 35]))
        self.begin = 1_767_225_600.0 + DAY * int(dice.integers(0, 60))
        self.end = self.begin + DAY * self.days - HOUR * float(dice.random() * 12)
        bins = int((self.end - self.begin) // BIN)
        self.times = self.begin + BIN * np.arange(bins)
        self.pools = ["web", "batch", "heavy"]
        self._make_events()
        self._make_hosts()
        self._make_releases()
        self.origins = [f"gen{int(dice.integers(10, 9000))}@api-{number}" for number in range(6)]
        self.tasks = [self._task(number, name) for number, name in enumerate(self.trade["tasks"])]

    def _make_events(self) -> None:
        """What happens to all: traffic grows, once the broker is down, once customers change."""
        dice, bins = self.dice, len(self.times)
        self.traffic = np.linspace(1, 1 + 0.5 * dice.random(), bins)
        down = int(bins * (0.1 + 0.8 * dice.random()))
        self.traffic[down : down + int(dice.integers(6, 30))] = 0
        self.shift = float(self.times[int(bins * (0.3 + 0.4 * dice.random()))])

    def _make_hosts(self) -> None:
        """Each pool has its hosts; a few come later or go earlier; the last is the canary."""
        dice = self.dice
        self.hosts: list[str] = []
        self.of_pool: list[Numbers] = []
        for pool in self.pools:
            count = int(dice.integers(7, 21))
            first = len(self.hosts)
            self.hosts += [
                self.trade["hosts"].format(pool=pool, number=number + 1) for number in range(count)
            ]
            self.of_pool.append(np.arange(first, first + count))
        self.born = np.full(len(self.hosts), -np.inf)
        self.gone = np.full(len(self.hosts), np.inf)
        for host in range(len(self.hosts)):
            moment = self.begin + (self.end - self.begin) * (0.3 + 0.4 * dice.random())
            if dice.random() < 0.1:
                self.born[host] = moment
            elif dice.random() < 0.1:
                self.gone[host] = moment
        for pool in self.of_pool:  # the canaries, and those that a cause may be of, always run
            self.born[pool[:2]], self.gone[pool[:2]] = -np.inf, np.inf
            self.born[pool[-1]], self.gone[pool[-1]] = -np.inf, np.inf
        self.worth = 0.5 + dice.random(len(self.hosts))

    def _make_releases(self) -> None:
        """Every few days one host after the other gets the next release; a canary a day before."""
        dice = self.dice
        starts, at = [self.begin - DAY], self.begin + DAY * (1.5 + 1.5 * dice.random())
        while at < self.end - 3 * DAY:
            starts.append(at)
            at += DAY * (2.5 + 3 * dice.random())
        first = int(dice.integers(1, 30))
        self.releases = [self.trade["releases"].format(first + n) for n in range(len(starts))]
        self.starts = np.array(starts)
        self.takes = HOUR * (0.5 + 7 * dice.random(len(starts)))
        places = dice.permuted(np.tile(np.arange(len(self.hosts)), (len(starts), 1)), axis=1)
        self.upgraded = self.starts[:, None] + self.takes[:, None] * places / len(self.hosts)
        for pool in self.of_pool:
            self.upgraded[:, pool[-1]] = self.starts - DAY * (0.7 + 0.6 * dice.random(len(starts)))

    def release_of(self, at: Numbers, host: Numbers) -> Numbers:
        release = np.zeros(len(at), int)
        for number in range(1, len(self.releases)):
            release[at >= self.upgraded[number][host]] = number
        return release

    def first(self, number: int) -> float:
        """When the first host had a release."""
        return float(np.min(self.upgraded[number]))

    def last(self, number: int) -> float:
        """When all hosts had a release."""
        return float(np.max(self.upgraded[number]))

    def _load(self, *, nightly: bool) -> Numbers:
        """Day and night, weekdays and Sundays; each task has its own."""
        dice, hours = self.dice, (self.times % DAY) / HOUR
        if nightly:
            return self.traffic * ((hours >= 1) & (hours < 4))
        peak, swing, sunday = dice.integers(8, 20), 0.3 + 0.5 * dice.random(), 0.4 + dice.random()
        weekend = (self.times // DAY + 3) % 7 >= 5
        wave = 1 + swing * np.cos(2 * np.pi * (hours - peak) / 24)
        strong = self.times // DAY == self.begin // DAY + int(dice.integers(self.days))
        wave *= np.where(strong, 1 + 2 * dice.random(), 1.0)
        return self.traffic * wave * np.where(weekend, min(sunday, 1.0), 1.0)

    def _task(self, number: int, name: str) -> Task:
        dice, trade = self.dice, self.trade
        queue = f"{trade['app'].split('.')[0]}.{('orders', 'slow', 'mail', 'bulk')[number % 4]}"
        # Some tasks take an object in their first argument, some keyword arguments only.
        whole = ("args", 0) if number % 3 == 1 else ("kwargs",)

        def place(*names: str) -> tuple[str | int, ...]:
            return (*whole, *names)

        def enum(path: Sequence[str], values: Sequence[str]) -> Argument:
            path = path[1:] if len(path) > 1 and number % 3 == 1 else path  # the object is a level
            weights = 0.3 + dice.random(len(values))
            weights[int(dice.integers(len(values)))] += 0.8
            return choice(place(*path), values, weights)

        label, *bounds, decimals = trade["amount"]
        day_first = dice.random() < 0.5
        found = {
            "order": self._order(place("order_id" if trade["app"] != "shop" else "number")),
            "tenant": self._tenant(place(trade["tenant"][0]), trade["tenant"][1]),
            "user": self._ids(place(trade["user"][0]), trade["user"][1], 50_000),
            "amount": self._amount(place(label), *bounds, decimals),
            "first": enum([trade["first"][0]], trade["first"][1]),
            "second": enum([trade["second"][0]], trade["second"][1]),
            "deep": enum(*trade["deep"]),
            "deeper": enum(*trade["deeper"]),
            "library": enum(*trade["library"]),
            "size": self._size(place(trade["size"])),
            "tags": self._tags(place(trade["tags"][0]), trade["tags"][1]),
            "flag": self._flag(place(trade["flag"])),
            "note": self._note(place("note")),
        }
        grows = {found["order"].feature}
        if dice.random() < 0.5:
            found["second"] = self._shifted(found["second"], trade["second"][1])
            grows.add(found["second"].feature)
        if day_first:
            found["day"] = self._day(place("as_of"))
            grows.add(found["day"].feature)
        name_of, values = trade["optional"]
        optional = choice(("kwargs", name_of), values, np.ones(len(values)))
        shown = 0.04 + 0.1 * dice.random()

        def given(dice: np.random.Generator, at: Numbers) -> Numbers:
            return np.where(dice.random(len(at)) < shown, optional.draw(dice, at), -1)

        return Task(
            name=f"{trade['app']}.{name}",
            queue=queue,
            pool=number % 4 % len(self.pools),  # the workers of a queue run all of its tasks
            arguments=found,
            optional=replace(optional, draw=given),
            load=self._load(nightly=len(trade["tasks"]) - 4 < number < len(trade["tasks"]) - 1),
            grows=frozenset(grows),
        )

    def _shifted(self, argument: Argument, values: Sequence[str]) -> Argument:
        """The same with other shares from a moment on: a customer comes, a provider is changed."""
        later = choice(argument.path, values, 0.2 + self.dice.random(len(values)))

        def draw(dice: np.random.Generator, at: Numbers) -> Numbers:
            return np.where(at < self.shift, argument.draw(dice, at), later.draw(dice, at))

        return replace(argument, draw=draw)

    def _order(self, path: tuple[str | int, ...]) -> Argument:
        pace, begin = 0.5 + self.dice.random(), self.begin

        def draw(dice: np.random.Generator, at: Numbers) -> Numbers:
            return (1e6 + (at - begin) * pace + dice.integers(0, 400, len(at))).astype(np.int64)

        return Argument(path, draw, lambda codes: [str(one) for one in codes.tolist()])

    def _day(self, path: tuple[str | int, ...]) -> Argument:
        def text(codes: Numbers) -> list[str]:
            known = {one: f'"{np.datetime64(one, "D")}"' for one in set(codes.tolist())}
            return [known[one] for one in codes.tolist()]

        return Argument(path, lambda _dice, at: (at // DAY).astype(int), text)

    def _tenant(self, path: tuple[str | int, ...], form: str) -> Argument:
        count = int(self.dice.integers(80, 400))
        weights = 1 / (1 + self.dice.integers(1, 8) + np.arange(count)) ** (
            0.3 + self.dice.random()
        )
        return choice(path, [form.format(number) for number in range(count)], weights)

    def _ids(self, path: tuple[str | int, ...], form: str, count: int) -> Argument:
        quoted = "{}" if form == "{}" else f'"{form}"'
        return Argument(
            path,
            lambda dice, at: dice.integers(0, count, len(at)),
            lambda codes: [quoted.format(one) for one in codes.tolist()],
        )

    def _amount(self, path: tuple[str | int, ...], low: int, high: int, decimals: int) -> Argument:
        def draw(dice: np.random.Generator, at: Numbers) -> Numbers:
            return low + ((high - low) * dice.beta(1.3, 2.0, len(at))).astype(np.int64)

        def text(codes: Numbers) -> list[str]:
            return [f"{one / 10**decimals:.{decimals}f}" for one in codes.tolist()]

        return Argument(path, draw, text)

    def _size(self, path: tuple[str | int, ...]) -> Argument:
        middle, width = 7 + 2 * self.dice.random(), 0.6 + 0.4 * self.dice.random()

        def draw(dice: np.random.Generator, at: Numbers) -> Numbers:
            return np.exp(dice.normal(middle, width, len(at))).astype(np.int64)

        return Argument(path, draw, lambda codes: [str(one) for one in codes.tolist()])

    def _tags(self, path: tuple[str | int, ...], names: Sequence[str]) -> Argument:
        shares = 0.08 + 0.3 * self.dice.random(len(names))
        texts = np.array(
            [
                json.dumps([name for place, name in enumerate(names) if mask >> place & 1])
                for mask in range(2 ** len(names))
            ],
            object,
        )
        bits = 1 << np.arange(len(names))

        def draw(dice: np.random.Generator, at: Numbers) -> Numbers:
            return (dice.random((len(at), len(names))) < shares) @ bits

        return Argument(path, draw, lambda codes: texts[codes].tolist())

    def _flag(self, path: tuple[str | int, ...]) -> Argument:
        share, texts = 0.1 + 0.25 * self.dice.random(), np.array(["false", "true"], object)
        return Argument(
            path,
            lambda dice, at: (dice.random(len(at)) < share).astype(int),
            lambda codes: texts[codes].tolist(),
        )

    def _note(self, path: tuple[str | int, ...]) -> Argument:
        """Free text, of which the length says something and the words say nothing."""
        words = self.dice.choice(list("aeioubdgklmnprst "), 5000)
        text = "".join(words)

        def draw(dice: np.random.Generator, at: Numbers) -> Numbers:
            length = np.exp(dice.normal(3.2, 0.8, len(at))).astype(np.int64)
            return np.minimum(length, 1500) + 10_000 * dice.integers(0, 3000, len(at))

        def texts(codes: Numbers) -> list[str]:
            places = zip((codes // 10_000).tolist(), (codes % 10_000).tolist(), strict=True)
            return [f'"{text[at : at + size]}"' for at, size in places]

        return Argument(path, draw, texts)

    def messages(self, task: Task, weights: Numbers, count: int) -> Messages:
        """Messages of a task at times of these weights."""
        dice = self.dice
        sums = np.cumsum(weights)
        places = np.searchsorted(sums, dice.random(count) * sums[-1], side="right")
        at = self.times[np.minimum(places, len(sums) - 1)] + BIN * dice.random(count)
        pool = self.of_pool[task.pool]
        shares = np.cumsum(self.worth[pool]) / self.worth[pool].sum()
        host = pool[np.minimum(np.searchsorted(shares, dice.random(count)), len(pool) - 1)]
        origin = np.minimum(dice.integers(0, 10, count), len(self.origins) - 1)
        found = Messages(at, host, self.release_of(at, host), origin)
        codes = {role: one.draw(dice, at) for role, one in task.arguments.items()}
        found.codes = {**codes, "optional": task.optional.draw(dice, at)}
        return found.where((at >= self.born[host]) & (at < self.gone[host]))
