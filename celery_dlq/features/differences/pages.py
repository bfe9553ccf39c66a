"""The page that says how the letters of a group differ from others."""

from __future__ import annotations

from celery_dlq.letters.explanation import name_of
from celery_dlq.web.http import Call, Page, get


def differences(call: Call) -> Page:
    """Show how some letters of a group differ from others; with ``more``, how many do."""
    queue, fingerprint = call.parts["queue"], call.parts["fingerprint"]
    found = call.dlq.group(queue, fingerprint)
    most, seconds = (5_000, 1.0) if call.value("more") else (300, 0.07)
    compared = call.dlq.differences(
        queue, fingerprint=fingerprint, most=most, deadline_seconds=seconds
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
        more=call.value("more"),
        findings=findings,
    )


ROUTES = (get("/queues/{queue}/groups/{fingerprint}/differences", differences, seconds=4.0),)
