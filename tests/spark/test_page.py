"""The HTML report: what it says, that it is self-contained, and how a real browser shows it."""

from __future__ import annotations

import itertools
import json
import os
import re
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from html.parser import HTMLParser
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from browser.looking import CHROMIUM, sync_playwright, violations
from builders import DLQ, a_delivery, a_key, a_letter, a_message, a_request, an_app, key_of
from click.testing import CliRunner
from servers import require
from test_charts import a_triage

from celery_dlq import DeadLetters
from celery_dlq.config import Settings
from celery_dlq.errors import ExportError
from celery_dlq.features.differences.sampling import Sampler, Samples
from celery_dlq.letters.causes import ComparedMessage, explain_causes
from celery_dlq.letters.course import CauseTiming, Onset, Release, Trend
from celery_dlq.letters.explanation import Explanation
from celery_dlq.letters.record import DeadLetter, Reason
from celery_dlq.policies.policy import Policy
from celery_dlq.policies.resolved import ResolvedPolicy
from celery_dlq.spark import charts
from celery_dlq.spark.page import rendered_page, write_page
from celery_dlq.spark.triage import rows
from celery_dlq.spark.triage.rows import EARLIEST, LATEST, Findings, findings
from celery_dlq.store.store import Store
from celery_dlq.worker.observer import SUCCEEDED
from celery_dlq.writing.letter import LetterMaker
from celery_dlq.writing.lifecycle import InFlight

NOTHING: dict[str, Any] = {
    "news_from": None,
    "new": (),
    "new_causes": 0,
    "spikes": (),
}

if TYPE_CHECKING:
    from conftest import Export
    from pyspark.sql import SparkSession

Command = Callable[..., Any]

NOON = datetime(2026, 3, 29, 12, 0, tzinfo=timezone.utc)
EVIL = "<script>alert('x')</script>"


def letters() -> list[DeadLetter]:
    """A cause with a planted currency, one that is new, one with an evil name, a look-alike."""
    dice = Random(7)  # noqa: S311 - the same every time
    found = []
    for number in range(240):
        bad = number % 3 == 0
        currency = "XXX" if bad else dice.choice(["EUR", "USD"])
        found.append(
            a_letter(
                fingerprint=("a" if bad else "b") * 16,
                description=f"order {number} cannot be charged" + ("" if bad else " twice"),
                dead_lettered_at=NOON + timedelta(minutes=number),
                deliveries=number % 4,
                reason=Reason.MAX_DELIVERIES_EXCEEDED if bad else Reason.FAILED,
                kwargs_json=json.dumps({"currency": currency, "n": dice.randrange(9)}),
            )
        )
    found += [
        a_letter(
            task_name=EVIL,
            fingerprint="c" * 16,
            description=f'{EVIL} & "quoted" \x1b[31m \u202e',
            dead_lettered_at=NOON + timedelta(minutes=235),
            dead_letter_queue="mails-DLQ",
        )
        for _ in range(40)
    ]
    return found


class Outline(HTMLParser):
    """Tags that were opened and closed, and everything that could load something."""

    VOID = frozenset({"meta", "link", "br", "wbr"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.loads: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.loads += [str(v) for n, v in attrs if n in {"src", "href", "srcset", "data"}]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_report_says_why_and_needs_nothing(
    spark: SparkSession, export: Export, tmp_path: Path
) -> None:
    """All answers are on the page, escaped; a real browser draws it without any other file."""
    found = findings(export(letters()), spark)
    (cause,) = [c for c in found.causes["a" * 16].findings if c.feature == "kwargs.currency"]
    assert (cause.value, cause.share_here, cause.share_elsewhere) == ("XXX", 1.0, 0.0)
    # Its task has no other letters, and those of other tasks have its host and release.
    lonely = found.causes["c" * 16]
    assert (lonely.findings, lonely.compared) == ((), {"same queues": 240})
    assert [(row.fingerprint, row.kind, row.letters) for row in found.new] == [
        ("c" * 16, "new", 40)
    ]
    assert {row.fingerprint for row in found.spikes} == {"c" * 16}
    file = write_page(found, tmp_path / "new folder" / "triage.html", NOON)
    text = file.read_text("utf-8")
    outline = Outline(text)
    assert outline.open == []
    assert outline.loads == ["data:,"]
    assert not outline.tags & {"script", "img", "iframe", "object", "base", "form"}
    assert "default-src 'none'" in text
    assert "url(" not in text and "@import" not in text  # noqa: PT018 - one thought
    charts_of = re.findall(r'<div class="chart ?\w*" role="img" aria-label="([^"]+)"><svg', text)
    of_cause = "Letters per 10 minutes of this cause"
    assert [label.split(",")[0] for label in charts_of] == [
        *[of_cause] * 3,
        "Letters per 10 minutes by the state of their cause",
    ]
    for said in (
        "280 dead letters of 3 causes in 2 queues",
        "&lt;script&gt;",
        "compared with each",
    ):
        assert said in text
    cards = dict(zip("bac", re.findall(r"<article.*?</article>", text, re.DOTALL), strict=True))
    assert "kwargs.currency = XXX" in cards["a"]
    assert '<article class="new">' in cards["c"]
    assert EVIL not in text
    assert "\x1b" not in text
    look_at(file, tmp_path)


def look_at(file: Path, folder: Path) -> None:
    """Chromium shows the page: bars in their colours, evil names as text."""
    browser = require(
        shutil.which("chromium") or shutil.which("google-chrome"), "Chromium (a system package)"
    )
    png = folder / "page.png"
    options = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        f"--user-data-dir={folder / 'profile'}",
        "--hide-scrollbars",
        "--window-size=1100,1600",
    ]
    for extra in ([f"--screenshot={png}"], ["--dump-dom"]):
        done = subprocess.run(
            [browser, *options, *extra, file.as_uri()],
            check=True,
            capture_output=True,
            text=True,
            timeout=120,
        )
    assert "&lt;script&gt;alert" in done.stdout
    assert "<script" not in done.stdout
    image = pytest.importorskip("matplotlib.image").imread(png)
    seen = {
        tuple(round(float(part) * 255) for part in pixel[:3])
        for pixel in image.reshape(-1, image.shape[-1])[::7]
    }
    for state in ("known", "new"):
        assert tuple(bytes.fromhex(charts.COLOURS[state][1:])) in seen
    assert len(seen) > 20  # letters of the text have many shades


# Words on two lines, and what reaches beyond the window.
LOOK = """() => {
    const broken = [], beyond = [];
    const walk = document.createTreeWalker(document.querySelector("main"), NodeFilter.SHOW_TEXT);
    for (let node; node = walk.nextNode();)
        for (const word of node.data.matchAll(/[\\w]+/g)) {
            const range = document.createRange();
            range.setStart(node, word.index);
            range.setEnd(node, word.index + word[0].length);
            const boxes = [...range.getClientRects()];
            if (new Set(boxes.map(box => box.top)).size > 1) broken.push(word[0]);
            if (boxes.some(box => box.right > innerWidth)) beyond.push(word[0]);
        }
    return {broken, beyond, sideways: document.documentElement.scrollWidth - innerWidth};
}"""


def an_explanation(kind: Any, *, began: datetime | None = None) -> Explanation:
    """Letters in CHF; the cause has a trend, and may have begun with a release."""
    messages = [
        ComparedMessage(cause, "shop.charge", "orders", NOON.timestamp() + number, frozenset(pairs))
        for cause, currency, count in (("a", "CHF", 30), (None, "EUR", 90))
        for pairs in [{("kwargs.currency", None), ("kwargs.currency", currency)}]
        for number in range(count)
    ]
    found = explain_causes(messages, {}, ["a"])["a"]
    at = None if began is None else began.timestamp()
    timing = CauseTiming(
        letters=30,
        onset=None if at is None else Onset(at, 60.0),
        trend=Trend(kind, NOON.timestamp()),
        began_with=None if at is None else Release("v7", at, 1e-9),
    )
    return replace(found, timing=timing)


@pytest.fixture
def report(tmp_path: Path) -> Path:
    """Give a page with a cause of each state, long names and nothing from Spark."""
    name = "shop.orders.fulfilment.charge_the_card_of_a_customer"
    triage = a_triage(groups=5, reasons=3, task_name=name, span=timedelta(hours=3))
    for group in triage.groups:
        group.example_id = "3f0f0a52-9c7e-4d18-a8a3-6f0d8a4f9a11"
        group.fingerprint = f"0123456789abcde{group.fingerprint[-1]}"
    prints = [group.fingerprint for group in triage.groups]
    whys = [
        an_explanation("steady", began=NOON + timedelta(hours=2)),
        an_explanation("growing"),
        an_explanation("over"),
        an_explanation("returned"),
    ]
    first = int(NOON.timestamp() // 600)
    found = Findings(
        triage=triage,
        causes=dict(zip(prints, whys, strict=False)),
        over_time={one: {first: 1, first + 15: 7} for one in [*prints, None]},
        **{**NOTHING, "news_from": NOON + timedelta(hours=1)},
    )
    return write_page(found, tmp_path / "triage.html", NOON)


def test_the_sentence_comes_first_with_what_it_rests_on(report: Path) -> None:
    """A card has its cause's state, sentence, findings, fingerprint, bars and the release."""
    text = report.read_text("utf-8")
    cards = re.findall(r'<article class="(\w+)">(.*?)</article>', text, re.DOTALL)
    tags = [re.findall(r'class="tag \w+">(\w+)<', card) for _state, card in cards]
    assert [state for state, _card in cards] == ["new", "known", "over", "new", "known"]
    assert tags == [["new"], ["growing"], ["over"], ["back"], ["known"]]
    order = ["<h3>Since 2026-03-29 14:00", "<h3>", 'class="finds"', "<svg", "began with v7", "0123"]
    places = [cards[0][1].index(part) for part in order]
    assert places == sorted(places)
    assert cards[0][1].count("<line") == 1
    assert "Not explained" in cards[4][1]
    assert text.index("<article") < text.index("Letters over time")
    assert "<code>dlq_sample_successes</code> samples them" in text[: text.index("<article")]


def test_a_report_breaks_no_word_and_is_accessible(report: Path) -> None:
    """On a phone and on a desk, by day and by night; on paper no card is cut in two."""
    browser = require(CHROMIUM if os.access(CHROMIUM, os.X_OK) else None, "chromium (of Debian)")
    require(sync_playwright, "playwright and axe-playwright-python (celery_dlq[test])")
    with sync_playwright() as started:
        chromium = started.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        # The page's policy allows no script, of axe neither.
        view = chromium.new_context(bypass_csp=True).new_page()
        view.goto(report.as_uri())
        for width, scheme in itertools.product((320, 390, 1100), ("light", "dark")):
            view.set_viewport_size({"width": width, "height": 800})
            view.emulate_media(color_scheme=scheme)
            assert view.evaluate(LOOK) == {"broken": [], "beyond": [], "sideways": 0}, width
            assert violations(view) == [], (width, scheme)
        view.emulate_media(media="print")
        style = "() => getComputedStyle(document.querySelector('article')).breakInside"
        assert view.evaluate(style) == "avoid-page"
        chromium.close()


@pytest.fixture
def command(redis_url: str) -> Iterator[Command]:
    """Run ``dlq``; the app has 30 letters of one cause in Redis, and a sample of successes."""
    from celery_dlq.cli.commands import dlq

    app = an_app(dlq_url=redis_url, dlq_queues={"orders": {"max_deliveries": 5}})
    dead_letters = DeadLetters(app)
    for number in range(30):
        kwargs = json.dumps({"currency": "CHF", "n": number % 9})
        letter = a_letter(args_json="[]", kwargs_json=kwargs, deliveries=5, dead_lettered_at=NOON)
        dead_letters.store.dead_letter(letter, key_of(letter))
    store = Store(redis_url)
    parts: Any = SimpleNamespace(
        backend=store,
        settings=Settings(features={"sample_successes": 0.5}),
        make=LetterMaker(clock=lambda: NOON, hostname="celery@web-1", pid=1),
    )
    sampler = Sampler(parts, chance=lambda: 0.0)
    resolved = ResolvedPolicy("orders", DLQ, Policy(max_deliveries=5), None)
    for number in range(90):
        body = json.dumps([[], {"currency": ("EUR", "USD")[number % 2], "n": number % 9}, {}])
        request = SimpleNamespace(
            id="1", message=a_message(body=body.encode()), request_dict=a_request(), worker_pid=7
        )
        delivery = a_delivery(number=2 if number < 10 else 1)
        sampler.after_end(request, InFlight(resolved, a_key(), delivery, first=False), SUCCEEDED)
    store.part(Samples).send_samples()
    store.connection.send_and_wait("PING")
    store.close()

    def run(*arguments: str) -> Any:
        return CliRunner().invoke(dlq, arguments, obj=SimpleNamespace(app=app, no_color=True))

    yield run
    dead_letters.close()
    app.close()


def test_command_compares_letters_with_successes(
    spark: SparkSession, command: Command, tmp_path: Path
) -> None:
    """A sample of successes shows what all letters share; mistakes are one line."""
    folder, good, file = (str(tmp_path / name) for name in ("letters", "good", "triage.html"))
    assert command("export", folder).exit_code == 0
    assert command("export", good, "--successes").exit_code == 0
    done = command("triage", folder, "--successes", good, "--html", file, "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["letters"] == 30
    text = Path(file).read_text("utf-8")
    assert "30 dead letters of 1 cause in 1 queue" in text
    assert "compared with 90 messages that succeeded" in text
    (card,) = re.findall(r"<article.*?</article>", text, re.DOTALL)
    assert "kwargs.currency = CHF" in card
    assert "of the sampled successes" in card
    tables = [
        [" ".join(re.sub("<[^>]+>", " ", row).split()) for row in table.split("<tr>")[1:]]
        for table in re.findall("<table.*?</table>", text.replace("<wbr>", ""), re.DOTALL)
    ]
    # One of two successes was sampled: 90 stand for 180.
    (limits,) = [table for table in tables if "advised" in table[0]]
    assert limits[1:] == [
        "shop.charge 90 1 210 160 0 76.2% 19.26% too few samples",
        "shop.charge 90 2 50 20 0 40.0% 4.09% too few samples",
        "shop.charge 90 5 30 0 30 0.0% 4.09% too few samples",
    ]
    (tmp_path / "file").touch()
    for arguments, text in [
        ([str(tmp_path / "nope"), "--html", file], "got no such folder"),
        ([folder, "--html", str(tmp_path / "file" / "x.html")], "file that can be written"),
        ([folder, "--successes", str(tmp_path / "nope"), "--html", file], "got no such folder"),
        ([folder, "--successes", folder, "--html", file], "to hold messages that succeeded"),
        ([good, "--html", file], "got messages that succeeded"),
    ]:
        done = command("triage", *arguments)
        assert (done.exit_code, done.stderr.count("\n")) == (1, 1), done.stderr
        assert text in done.stderr


def test_letters_without_times_have_a_report(spark: SparkSession, tmp_path: Path) -> None:
    """Rows of a foreign writer that lack nearly everything are shown as unknown."""
    import pyarrow.parquet as pq

    from celery_dlq.export import table

    pq.write_table(
        table.table([{b"dead_letter_queue": b"orders-DLQ"}] * 7), tmp_path / "odd.parquet"
    )
    found: Findings = findings(tmp_path, spark)
    assert (found.news_from, found.new, found.causes) == (None, (), {})
    assert "The letters have no times." in rendered_page(found, NOON)


@pytest.mark.parametrize("times", [(EARLIEST, NOON, LATEST), (EARLIEST,), (LATEST,)])
def test_times_at_the_ends_of_the_calendar_are_shown(
    spark: SparkSession, export: Export, times: tuple[datetime, ...]
) -> None:
    """A bucket and the margin of an axis may begin before the year 1 does."""
    folder = export([a_letter(dead_lettered_at=time) for time in times])
    found = rows.triage(folder, spark)
    assert sum(row.letters for row in found.timeline) == len(times)
    assert f"{times[0]:%m-%d}" in rendered_page(Findings(triage=found, causes={}, **NOTHING), NOON)


def test_an_unwritable_report_place_is_refused(tmp_path: Path) -> None:
    """A page that cannot be written says so, with its name, and leaves no half one."""
    found = Findings(triage=a_triage(groups=60, reasons=12), causes={}, **NOTHING)
    assert "60 causes with 60 letters are not explained" in rendered_page(found, NOON)
    (tmp_path / "file").touch()
    with pytest.raises(ExportError, match=r"expected .*x\.html to be a file that can be written"):
        write_page(found, tmp_path / "file" / "x.html", NOON)
    file = write_page(found, tmp_path / "out" / "triage.html", NOON)
    before, limits = file.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))  # as a full disk
    try:
        with pytest.raises(ExportError, match=r"triage\.html to be a file that can be written"):
            write_page(found, file, NOON + timedelta(days=1))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert file.read_bytes() == before
    assert list(file.parent.iterdir()) == [file]
