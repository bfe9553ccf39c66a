"""The page that says how the letters of a group differ from others."""

from __future__ import annotations

from celery_dlq.web.http import Call, Page, get


def differences(call: Call) -> Page:
    """Show how the letters of a group differ from others; reads 5,000 of them."""
    queue, fingerprint = call.parts["queue"], call.parts["fingerprint"]
    found = call.dlq.group(queue, fingerprint)
    compared = call.dlq.differences(queue, fingerprint=fingerprint, deadline_seconds=1.0)
    findings = []
    for finding in compared.findings:
        selects = {**finding.where, "conditions": finding.condition or ""}
        query = {"fingerprint": fingerprint, **selects} if any(selects.values()) else {}
        findings.append((finding, query))
    return call.page(
        "differences.html",
        title=f"{queue}: how {found.exception_type or found.reason} differs",
        group=found,
        compared=compared,
        findings=findings,
    )


ROUTES = (get("/queues/{queue}/groups/{fingerprint}/differences", differences, seconds=4.0),)
