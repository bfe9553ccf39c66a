"""The page that says how the letters of a group differ from others."""

from __future__ import annotations

from collections.abc import Sequence

from celery_dlq.features.differences.shares import shares
from celery_dlq.letters.explanation import name_of
from celery_dlq.store.records import Group
from celery_dlq.web.http import Call, Page, Panel, get

_MOST_LETTERS, SECONDS = 300, 0.03


def differences(call: Call) -> Page:
    """Show how some letters of a group differ from others."""
    queue, fingerprint = call.parts["queue"], call.parts["fingerprint"]
    found = call.dlq.group(queue, fingerprint)
    compared = call.dlq.differences(
        queue, fingerprint=fingerprint, most=_MOST_LETTERS, deadline_seconds=SECONDS
    )
    findings = []
    for finding in compared.findings:
        query = {"fingerprint": fingerprint, **finding.where} if finding.where else {}
        findings.append((finding, name_of(finding), query))
    return call.page(
        "differences.html",
        title=f"{queue}: how {found.exception_type or found.reason} differs",
        group=found,
        compared=compared,
        findings=findings,
    )


def link(_call: Call, _group: Group) -> Panel:
    """The link from the page of a group to the page of its differences."""
    return "differences_link.html", {}


def in_row(call: Call, groups: Sequence[Group]) -> Panel:
    """What most letters of each cause of a list have, and others have less often."""
    masked, names = call.dlq.redaction.arguments, [group.fingerprint for group in groups]
    found, in_time = shares(call.dlq.assembly.reading(), masked, call.parts["queue"], names)
    return "differences_row.html", {"shares": found, "in_time": in_time}


ROUTES = (get("/queues/{queue}/groups/{fingerprint}/differences", differences),)
