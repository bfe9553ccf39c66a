"""Fingerprints: one cause, one fingerprint."""

from __future__ import annotations

import time
import traceback

import pytest

from celery_dlq.letters.fingerprint import application_frames, fingerprint

TRACEBACK = """Traceback (most recent call last):
  File "/srv/venv/lib/python3.11/site-packages/celery/app/trace.py", line 451, in trace_task
    R = retval = fun(*args, **kwargs)
  File "/srv/shop/orders/tasks.py", line 12, in charge
    pay(order_id)
  File "/srv/shop/orders/payment.py", line 90, in pay
    raise ValueError(f"order {order_id} has no price")
ValueError: order 17 has no price
"""


def of(
    text: str | None = TRACEBACK,
    *,
    task_name: str = "shop.charge",
    exception_type: str | None = "ValueError",
    reason: str = "failed",
) -> str:
    """The fingerprint of the example death, with changes."""
    return fingerprint(
        task_name=task_name, reason=reason, exception_type=exception_type, traceback=text
    )


def test_the_fingerprint_of_an_exception_never_changes_between_releases() -> None:
    """A stored letter of last year is in one group with one of today."""
    assert of() == "75ff200f7f0d3d17"


def test_the_fingerprint_of_a_reason_never_changes_between_releases() -> None:
    """Deaths without an exception keep their group too."""
    assert of(None, exception_type=None, reason="max_deliveries_exceeded") == "e1406254205df023"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("line 90", "line 91"),
        ("order 17 has", "order 18 has"),
        ("/srv/shop/", "/home/me/work/shop/"),
        ("/srv/venv/lib/python3.11/site-packages/", "/usr/lib/python3/dist-packages/"),
        ("/srv/shop/orders/payment.py", "C:\\apps\\shop\\orders\\payment.py"),
        ("    pay(order_id)\n", "    pay(order_id)\n    ^^^^^^^^^^^^^\n"),
        ("line 451, in trace_task", "line 760, in __protected_call__"),
        ("/srv/shop/orders/", "/srv/releases/20261122/"),
        ("/srv/shop/", "/srv/venv/lib/python3.12/site-packages/shop/"),
        ("/srv/shop/", "/root/.pex/installed_wheels/0a1b/shop-1.0-py3-none-any.whl/shop/"),
        ("/srv/shop/", "/srv/shop.zip/"),
        ("ValueError: order 17", 'ValueError:\n  File "x.py", line 1, in gone\norder 17'),
        ("ValueError: order 17", 'ValueError: a\nTraceback (most recent call last):\n  File "x"'),
    ],
)
def test_data_and_places_do_not_change_it(old: str, new: str) -> None:
    """Line numbers, messages, install folders and library frames stay out."""
    assert old in TRACEBACK
    assert of(TRACEBACK.replace(old, new)) == of()


@pytest.mark.parametrize(
    ("old", "new"),
    [("in pay\n", "in refund\n"), ("payment.py", "refund.py"), ("in charge", "in charge_again")],
)
def test_another_place_in_the_code_changes_it(old: str, new: str) -> None:
    """Bugs differ by function and file name of the application's frames."""
    assert of(TRACEBACK.replace(old, new)) != of()


def test_task_and_exception_type_change_it() -> None:
    """Two tasks with one broken function are two groups, and so are two types."""
    assert len({of(), of(task_name="shop.refund"), of(exception_type="KeyError")}) == 3


def test_the_reason_counts_only_without_an_exception() -> None:
    """The same exception is one group, whether a retry was left or not."""
    assert of(reason="failed") == of(reason="max_retries_exceeded")
    assert of(exception_type=None, reason="expired") != of(exception_type=None, reason="adopted")


def test_only_the_traceback_that_escaped_counts() -> None:
    """Of a chain of exceptions the last one is what killed the task."""
    for link in (
        "During handling of the above exception, another exception occurred",
        "The above exception was the direct cause of the following exception",
    ):
        first = TRACEBACK.replace("in pay", "in look_up").replace("payment.py", "cache.py")
        assert of(f"{first}\n{link}:\n\n{TRACEBACK}") == of()


def test_a_real_chained_traceback_gives_the_frames_of_the_last_exception() -> None:
    """Python's own text is understood, not only the example above."""

    def look_up() -> None:
        raise KeyError

    def pay() -> None:
        try:
            look_up()
        except KeyError as exc:
            raise ValueError("no price") from exc

    try:
        pay()
    except ValueError:
        text = traceback.format_exc()
    here = "test_fingerprint.py"
    assert application_frames(text) == [
        f"{here}:test_a_real_chained_traceback_gives_the_frames_of_the_last_exception",
        f"{here}:pay",
    ]


def test_library_frames_are_taken_when_there_are_no_others() -> None:
    """A task that is a library's function still has a place."""
    text = TRACEBACK[: TRACEBACK.index('  File "/srv/shop')]
    assert application_frames(text) == ["trace.py:trace_task"]


def test_the_innermost_frames_count() -> None:
    """The depth of the call makes no new group."""
    deeper = '  File "/srv/shop/orders/views.py", line 3, in view\n    charge(1)\n'
    middle = '  File "/srv/shop/orders/prices.py", line 5, in price\n    look()\n'
    at = TRACEBACK.index('  File "/srv/shop/orders/tasks.py"')
    inner = TRACEBACK.index('  File "/srv/shop/orders/payment.py"')
    three = TRACEBACK[:inner] + middle + TRACEBACK[inner:]
    assert of(three[:at] + deeper + three[at:]) == of(three)


@pytest.mark.parametrize("text", [None, "", "not a traceback", "\x00" * 100, "\ud800"])
def test_any_text_gives_sixteen_hexadecimal_digits(text: str | None) -> None:
    """A fingerprint is always there, whatever the traceback says."""
    found = of(text)
    assert len(found) == 16
    assert int(found, 16) >= 0


def test_odd_task_names_do_not_raise() -> None:
    """A name with a lone surrogate came over the wire; its letter must still be stored."""
    assert of(task_name="\ud800") != of()


@pytest.mark.parametrize(
    "unit",
    ['  File "/srv/shop/a.py", line 1, in f\n    f()\n', " " * 64, 'File "', "x" * 64, "\n" * 64],
)
def test_a_huge_traceback_takes_no_time(unit: str) -> None:
    """Ten megabytes of any shape take less time than a person would notice."""
    text = unit * (10 * 1024 * 1024 // len(unit))
    began = time.process_time()
    of(text)
    assert time.process_time() - began < 2.0
