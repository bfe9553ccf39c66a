"""The docs, the alert rules and the dashboard name what the code has."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from celery_dlq import events
from celery_dlq.config import Settings
from celery_dlq.letters.record import Outcome
from celery_dlq.store.metrics import METRICS, SUCCEEDED

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/reference/events.md").read_text("utf-8")
SENTRY_PAGE = (ROOT / "docs/how-to/sentry.md").read_text("utf-8")
ALERTING = ROOT / "examples/alerting"
EVENTS = [
    thing
    for thing in vars(events).values()
    if isinstance(thing, type) and issubclass(thing, events.Event) and thing is not events.Event
]


def rows(header: str, page: str = PAGE) -> list[list[str]]:
    """The rows of the table under a header line, each cell without its back quotes."""
    lines = iter(page.splitlines())
    for line in lines:
        if line == header:
            break
    next(lines)
    found = []
    for line in lines:
        if not line.startswith("|"):
            break
        found.append([cell.strip().replace("`", "") for cell in line.strip("|").split("|")])
    return found


def test_every_field_of_every_event_is_documented() -> None:
    """In the order of the dataclass."""
    in_docs = [tuple(row[:2]) for row in rows("| event | field | unit |")]
    in_code = [
        (event.__name__, field.name) for event in EVENTS for field in dataclasses.fields(event)
    ]
    assert in_docs == in_code
    assert all(row[2] for row in rows("| event | field | unit |"))


def test_every_action_is_documented() -> None:
    """In the order of the list in the code."""
    listed = PAGE.partition("Actions of a `Change`: ")[2].partition(".")[0]
    assert re.findall(r"`(\w+)`", listed) == [action.value for action in events.Action]


@pytest.mark.parametrize("event", EVENTS)
def test_events_are_frozen(event: Any) -> None:
    """An observer cannot change what the next one sees."""
    assert event.__dataclass_params__.frozen


def test_every_metric_is_documented() -> None:
    """Name, type and labels."""
    in_docs = [
        (name, kind, tuple(label for label in labels.split(", ") if label))
        for name, kind, labels, _unit in rows("| metric | type | labels | meaning |")
    ]
    assert in_docs == [(m.name, m.measure.value, m.labels) for m in METRICS.values()]


def test_every_choice_of_dlq_sentry_is_documented() -> None:
    """The table has the settings' own words."""
    header = next(line for line in SENTRY_PAGE.splitlines() if line.startswith("| `dlq_sentry` |"))
    choices = [row[0].removesuffix(" (default)") for row in rows(header, SENTRY_PAGE)]
    assert choices == ["True", "False"]
    assert Settings().of("sentry") is True


def expressions() -> list[str]:
    """All PromQL of the examples."""
    rules = yaml.safe_load((ALERTING / "alerts.yml").read_text("utf-8"))
    dashboard = json.loads((ALERTING / "dashboard.json").read_text("utf-8"))
    alerts = [rule["expr"] for group in rules["groups"] for rule in group["rules"]]
    panels = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    variables = [
        v["query"]["query"] for v in dashboard["templating"]["list"] if v["type"] == "query"
    ]
    return alerts + panels + variables


def test_alerts_and_dashboard_use_metrics_that_exist_and_use_them_all() -> None:
    """A renamed metric would otherwise be an alert that never comes."""
    used = {name for text in expressions() for name in re.findall(r"celery_dlq_\w+", text)}
    assert used == set(METRICS)


def test_alerts_and_dashboard_use_labels_that_exist() -> None:
    """In matchers and in groupings."""
    labels = {label for metric in METRICS.values() for label in metric.labels}
    for text in expressions():
        for name, matchers in re.findall(r"(celery_dlq_\w+)\{([^}]*)\}", text):
            asked = set(re.findall(r"(\w+)\s*(?:=~|!=|!~|=)", matchers))
            assert asked <= set(METRICS[name].labels), text
        for grouping in re.findall(r"by \(([^)]*)\)", text):
            assert set(grouping.split(", ")) <= labels, text
        for outcomes in re.findall(r'outcome(?:=~|!=|=)"([^"]*)"', text):
            assert set(outcomes.split("|")) <= {SUCCEEDED, *(o.value for o in Outcome)}, text


def test_alerts_say_what_happened_and_what_to_do() -> None:
    """Each has a severity, and speaks only of labels that its expression leaves."""
    rules = yaml.safe_load((ALERTING / "alerts.yml").read_text("utf-8"))
    for rule in rules["groups"][0]["rules"]:
        assert set(rule["annotations"]) == {"summary", "action"}, rule["alert"]
        assert rule["labels"]["severity"] in {"warning", "critical"}
        metrics = re.findall(r"celery_dlq_\w+", rule["expr"])
        kept = re.findall(r"by \(([^)]*)\)", rule["expr"])
        there = (
            set(", ".join(kept).split(", "))
            if kept
            else {label for name in metrics for label in METRICS[name].labels}
        )
        said = re.findall(r"\$labels\.(\w+)", " ".join(rule["annotations"].values()))
        assert set(said) <= there, rule["alert"]


def test_the_dashboard_has_no_two_panels_in_one_place() -> None:
    """And every panel a title and a data source that can be chosen."""
    dashboard = json.loads((ALERTING / "dashboard.json").read_text("utf-8"))
    cells: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        mine = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not mine & cells, panel["title"]
        cells |= mine
        assert panel["title"]
        assert panel["datasource"]["uid"] == "${datasource}"
