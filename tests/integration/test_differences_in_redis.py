"""`dlq differences` on a real Redis: the cause that was planted, on the screen and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from builders import DLQ, a_letter, an_app, key_of
from click.testing import CliRunner, Result
from waiting import poll

from celery_dlq import DeadLetters
from celery_dlq.cli.commands import dlq as commands
from celery_dlq.features.differences.sampling import Samples

GROUP = "a" * 16


@pytest.fixture
def shop(redis_url: str) -> Iterator[DeadLetters]:
    """Letters of two causes, and sampled successes; tenant 42 has one of the causes."""
    made = DeadLetters(an_app(broker_url=redis_url, dlq_queues={"orders": {"max_deliveries": 3}}))
    dice = Random(6)  # noqa: S311 - the same every time

    def arguments(tenant: int) -> dict[str, Any]:
        kwargs = {"tenant": tenant, "order": dice.randrange(10**30), "kind": dice.choice("abc")}
        args, body = [dice.randrange(9)], [[], kwargs, {}]
        return {
            "args_json": json.dumps(args),
            "kwargs_json": json.dumps(kwargs),
            "body": json.dumps(body).encode(),
            "worker_hostname": f"celery@web-{dice.randrange(5)}",
            "traceback": "a line\n" * 50,
        }

    for number in range(150):
        inside = number % 3 == 0
        values = arguments(42 if inside else dice.randrange(40))
        letter = a_letter(fingerprint=GROUP if inside else "b" * 16, **values)
        made.store.dead_letter(letter, key_of(letter))
    samples, sampled = made.assembly.backend.part(Samples), made.assembly.backend.sampled
    for _ in range(50):
        fields = a_letter(fingerprint="", **arguments(dice.randrange(40))).to_fields()
        del fields["body"], fields["traceback"]
        samples.add_sample(DLQ, {**fields, "reason": b"succeeded"})
    samples.send_samples()
    poll(lambda: sum(map(len, pages(sampled))) == 50)
    yield made
    made.close()


def pages(store: Any) -> Iterator[Any]:
    """All pages of a queue."""
    return store.fields(DLQ, after=None, until=None, page_size=500)  # type: ignore[no-any-return]


def run(shop: DeadLetters, *arguments: str) -> Result:
    """Run a command in this process, 100 columns wide."""
    context = SimpleNamespace(app=shop.app, no_color=True)
    return CliRunner(env={"COLUMNS": "100"}).invoke(commands, [*arguments], obj=context)


def test_the_planted_cause_is_found_in_redis(shop: DeadLetters) -> None:
    """Packed letters and samples are compared; nothing changes, no body is decoded."""
    found = shop.differences(DLQ, fingerprint="aaaa", deadline_seconds=60)
    assert (found.letters, found.others, found.successes, found.cut) == (50, 100, 50, False)
    assert [one.condition for one in found.findings] == ["kwargs.tenant=42"]
    assert shop.store.length(DLQ) == 150


def test_the_command_shows_it(shop: DeadLetters) -> None:
    """A table for people, one object for programs."""
    done = run(shop, "differences", DLQ, "--fingerprint", GROUP)
    assert done.exit_code == 0
    said = " ".join(done.output.split())
    tenant = "ll of these letters have kwargs.tenant = 42, against none of the sampled successes"
    assert tenant in done.output.splitlines()[0]
    for text in (
        "All 50 letters have kwargs.tenant = 42 (others: 0 of 50).",
        "Compared with 50 sampled successes of the task and 100 other letters of the task.",
    ):
        assert text in said
    assert "All of these letters have kwargs.tenant = 42, against" in said
    (line,) = run(shop, "differences", DLQ, "--fingerprint", GROUP, "--json").output.splitlines()
    found = json.loads(line)
    assert found["letters"] == 50
    assert found["findings"][0]["condition"] == "kwargs.tenant=42"


@pytest.mark.parametrize("fingerprint", [GROUP, "aaaa"], ids=["whole", "its first digits"])
def test_the_command_says_of_how_many_it_looked_at_the_newest(
    shop: DeadLetters, monkeypatch: pytest.MonkeyPatch, fingerprint: str
) -> None:
    """In words and as JSON: what is said of all is said of those that were looked at."""
    monkeypatch.setattr("celery_dlq.features.differences.operations.OF_EACH_SIDE", 0.004)
    chosen = ("differences", DLQ, "--fingerprint", fingerprint)
    said = " ".join(run(shop, *chosen).output.split())
    assert said.startswith(
        "All 20 letters that were looked at, the newest of 50, have kwargs.tenan"
    )
    found = json.loads(run(shop, *chosen, "--json").output)
    assert (found["letters"], found["cut"], found["selected"]) == (20, True, 50)


def test_the_time_of_a_cause_is_said_while_all_of_its_letters_are_there(
    shop: DeadLetters,
) -> None:
    """Since when, by the clock of Redis; of what is left after a removal it would be wrong."""
    now, dice = datetime.now(timezone.utc), Random(7)  # noqa: S311 - the same every time
    times = [(dice.uniform(0, 2), True) for _ in range(80)]
    times += [(dice.uniform(0, 24), False) for _ in range(160)]
    for number, (hours, new) in enumerate(sorted(times, reverse=True)):
        letter = a_letter(
            dead_letter_queue="timed-DLQ",
            fingerprint=("c" if new else "d") * 16,
            kwargs_json=json.dumps({"order": number}),
            dead_lettered_at=now - timedelta(hours=hours),
        )
        shop.store.dead_letter(letter, key_of(letter))
    chosen = ("differences", "timed-DLQ", "--fingerprint", "c" * 16)
    said = run(shop, *chosen).output
    begun = now - timedelta(hours=2)
    onset = datetime.strptime(said[:26], "Since %Y-%m-%d %H:%M UTC").replace(tzinfo=timezone.utc)
    assert abs(onset - begun) < timedelta(minutes=10)
    steady = run(shop, *chosen[:-1], "d" * 16).output
    assert "give or take" not in steady
    gone = [one.id for one in shop.letters("timed-DLQ", fingerprint="c" * 16)][:70]
    shop.discard("timed-DLQ", ids=frozenset(gone))
    assert "give or take" not in run(shop, *chosen).output


def test_exported_successes_are_no_letters(shop: DeadLetters, tmp_path: Path) -> None:
    """The command says what it wrote."""
    done = run(shop, "export", str(tmp_path / "good"), "--successes")
    assert (done.exit_code, done.output.startswith("Exported 50 successes (")) == (0, True)


def test_that_nothing_stands_out_is_said_only_if_all_was_compared(shop: DeadLetters) -> None:
    """So are a filter that matches nothing, and a queue that is not there."""
    for number in range(20):
        kwargs = json.dumps({"tenant": 0, "order": number})
        letter = a_letter(dead_letter_queue="quiet-DLQ", kwargs_json=kwargs)
        shop.store.dead_letter(letter, key_of(letter))
    done = run(shop, "differences", "quiet-DLQ")
    _headline, shared, compared = done.output.splitlines()
    assert (done.exit_code, shared) == (
        0,
        "All 20 letters have args[0] = 1, kwargs.tenant = 0, task = shop.charge.",
    )
    assert compared.startswith("There is nothing to compare 20 letters with")
    noise = run(shop, "differences", DLQ, "--fingerprint", "bbbb")
    assert noise.output.splitlines()[-1].startswith("Nothing stands out: no value, set of values,")
    none = run(shop, "differences", DLQ, "--task", "nobody")
    assert (none.exit_code, "no letter of 'orders-DLQ' matches" in none.output) == (1, True)
    unknown = run(shop, "differences", "nowhere")
    assert (unknown.exit_code, "got 'nowhere'" in unknown.output) == (1, True)


def test_a_hostile_value_does_not_steer_the_terminal(shop: DeadLetters) -> None:
    """Values come from whoever may publish."""
    for number in range(30):
        evil = json.dumps({"note": "\x1b[2J\nforged [red]", "tenant": number})
        letter = a_letter(fingerprint="e" * 16, kwargs_json=evil, worker_hostname="\x1b]0;x\x07")
        shop.store.dead_letter(letter, key_of(letter))
    done = run(shop, "differences", DLQ, "--fingerprint", "eeee")
    assert done.exit_code == 0
    assert "\x1b" not in done.output
    assert r"\x1b" in done.output
    assert not any(line.strip().startswith("forged") for line in done.output.splitlines())
