"""Values of a message as trees: bounded, whatever a publisher wrote."""

from __future__ import annotations

import json
from typing import Any

import pytest
from builders import a_letter

from celery_dlq.operations.edit import edits_of
from celery_dlq.web.pages import letters as pages


def nodes(root: pages.Node) -> list[pages.Node]:
    """All nodes below one, and itself."""
    return [root, *(one for child in root.children for one in nodes(child))]


def test_each_value_has_its_path_and_a_filter() -> None:
    """So a click finds the letters with the same value."""
    found = nodes(pages.tree_of({"order": {"id": 7, "lines": [{"sku": "a"}]}}, "kwargs"))
    paths = {node.path: node.filter for node in found if node.kind == "value"}
    assert paths == {
        "kwargs.order.id": "kwargs.order.id=7",
        "kwargs.order.lines[0].sku": 'kwargs.order.lines[0].sku="a"',
    }


@pytest.mark.parametrize("key", ["a.b", "x=1", "[0]", 'q"', "", "é ü"])
def test_filters_of_odd_keys_find_their_letter(key: str) -> None:
    """The grammar of conditions quotes them in the same way."""
    from celery_dlq.letters.filters import LetterFilter

    kwargs = {key: "v"}
    (leaf,) = pages.tree_of(kwargs, "kwargs").children
    letter = a_letter(body=json.dumps([[], kwargs, None]).encode(), kwargs_json=json.dumps(kwargs))
    assert LetterFilter(conditions=(leaf.filter,)).matches(letter)


@pytest.mark.parametrize(
    "value",
    [
        {f"k{n}": n for n in range(10_000)},
        list(range(10_000)),
        [[0] * 150 for _ in range(150)],
        "x" * 10_000_000,
    ],
)
def test_a_large_value_is_cut(value: Any) -> None:
    """A page of it stays small."""
    found = nodes(pages.tree_of(value, "kwargs"))
    assert len(found) <= pages.MAX_NODES + 1
    assert sum(len(node.text) for node in found) < 10_000


def test_a_deep_value_is_cut() -> None:
    """900 levels would end the template."""
    value: Any = 1
    for _ in range(900):
        value = [value]
    assert len(nodes(pages.tree_of(value, "args"))) <= pages.MAX_DEPTH + 1


def test_numbers_are_exact() -> None:
    """JavaScript would round them."""
    (leaf,) = pages.tree_of({"id": 12345678901234567890}, "kwargs").children
    assert leaf.text == "12345678901234567890"


def test_edits_of_any_form_are_shown_or_left_out() -> None:
    """The header comes from a publisher, too."""
    edits = json.dumps([{"at": 1, "actor": None, "from": [], "to": "{}"}, 7, None])
    headers = {"dlq_edited": edits, "dlq_redrive": "20260101-1"}
    assert edits_of(headers) == [{"to": "{}"}]
    assert edits_of({"dlq_edited": 5, "dlq_redrive": []}) == []
