"""The HTML report: what it says, that it is self-contained, and how a real browser shows it."""

from __future__ import annotations

import json
import re
import resource
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from html.parser import HTMLParser
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from builders import DLQ, a_delivery, a_key, a_letter, a_message, a_request, an_app, key_of
from click.testing import CliRunner
from servers import require

from celery_dlq import DeadLetters
from celery_dlq.errors import ExportError
from celery_dlq.features.differences.sampling import Sampler, Samples
from celery_dlq.letters.comparison import SUCCESSES
from celery_dlq.letters.explanation import Side, explain
from celery_dlq.letters.record import DeadLetter, Reason
from celery_dlq.policies.policy import Policy
from celery_dlq.policies.resolved import ResolvedPolicy
from celery_dlq.spark import charts
from celery_dlq.spark.page import page, write_page
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

    VOID = frozenset({"meta", "link", "br"})

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
    assert (lonely.findings, lonely.compared) == ((), {"same tasks": 0, "same queues": 240})
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
    charts_of = re.findall(r'<div class="chart" role="img" aria-label="([^"]+)"><svg', text)
    assert [label.split(" by ")[0] for label in charts_of] == ["Letters per 10 minutes", "Letters"]
    for said in ("280 dead letters in 2 queues", "<b>XXX</b>", "kwargs.currency", "&lt;script&gt;"):
        assert said in text
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
    for reason in (Reason.MAX_DELIVERIES_EXCEEDED, Reason.FAILED):
        colour = charts.COLOURS[reason.value]
        assert tuple(bytes.fromhex(colour[1:])) in seen
    assert len(seen) > 20  # letters of the text have many shades


LOOK = """() => ({
    wide: document.documentElement.scrollWidth,
    beyond: [...document.querySelectorAll("td")].filter(
        cell => cell.getBoundingClientRect().right > innerWidth).length,
    broken: [...document.querySelectorAll("td b, td code")].filter(
        name => name.getClientRects().length > 1).map(name => name.textContent),
    label: getComputedStyle(document.querySelector("td.n"), "::before").content,
})"""


def test_a_narrow_report_breaks_no_name_and_hides_nothing(tmp_path: Path) -> None:
    """On a phone each row is a block of lines, each with the name of its column."""
    from test_charts import a_triage

    playwright = pytest.importorskip("playwright.sync_api")
    browser = require(
        shutil.which("chromium") or shutil.which("google-chrome"), "Chromium (a system package)"
    )
    triage = a_triage(groups=3, reasons=3, task_name="shop.orders.charge_the_card")
    for group in triage.groups:
        group.example_id = "3f0f0a52-9c7e-4d18-a8a3-6f0d8a4f9a11"
    kinds = [{("kwargs.currency", None), ("kwargs.currency", kind)} for kind in ("CHF", "EUR")]
    side = Side(SUCCESSES, 90, Counter(list(kinds[1]) * 90))
    why = explain(Counter(list(kinds[0]) * 30), 30, [side])
    assert why.findings
    found = Findings(triage=triage, causes={triage.groups[0].fingerprint: why}, **NOTHING)
    file = write_page(found, tmp_path / "triage.html", NOON)
    with playwright.sync_playwright() as started:
        chromium = started.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        view = chromium.new_page(viewport={"width": 390, "height": 800})
        view.goto(file.as_uri())
        seen = view.evaluate(LOOK)
        view.screenshot(path=tmp_path / "narrow.png", full_page=True)
        chromium.close()
    assert seen == {"wide": 390, "beyond": 0, "broken": [], "label": '"letters"'}


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
        settings=SimpleNamespace(sample_successes=0.5),
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
    store.part(Samples).flush()
    store.connection.call("PING")
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
    assert "30 dead letters in 1 queue" in text
    tables = [
        [" ".join(re.sub("<[^>]+>", " ", row).split()) for row in table.split("<tr>")[1:]]
        for table in re.findall("<table.*?</table>", text, re.DOTALL)
    ]
    (causes,) = [table for table in tables if "lift" in table[0]]
    assert causes[1:] == [
        "kwargs.currency = CHF 100% 0.0% 180.0× below 1e-12 90 sampled successes of its task"
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
    assert "The letters have no times." in page(found, NOON)


@pytest.mark.parametrize("times", [(EARLIEST, NOON, LATEST), (EARLIEST,), (LATEST,)])
def test_times_at_the_ends_of_the_calendar_are_shown(
    spark: SparkSession, export: Export, times: tuple[datetime, ...]
) -> None:
    """A bucket and the margin of an axis may begin before the year 1 does."""
    folder = export([a_letter(dead_lettered_at=time) for time in times])
    found = rows.triage(folder, spark)
    assert sum(row.letters for row in found.timeline) == len(times)
    assert f"{times[0]:%m-%d}" in page(Findings(triage=found, causes={}, **NOTHING), NOON)


def test_an_unwritable_report_place_is_refused(tmp_path: Path) -> None:
    """A page that cannot be written says so, with its name, and leaves no half one."""
    from test_charts import a_triage

    found = Findings(triage=a_triage(groups=60, reasons=12), causes={}, **NOTHING)
    assert "and 10 smaller groups with 10 letters" in page(found, NOON)
    assert "No group with a known cause has the 5 letters" in page(found, NOON)
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
