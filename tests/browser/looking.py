"""The browser, and what may not happen in any of its pages."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

try:
    from axe_playwright_python.sync_playwright import Axe
    from playwright.sync_api import expect, sync_playwright
except ImportError:  # the fixture `chromium` says so
    Axe = expect = sync_playwright = None  # type: ignore[assignment,misc]

CHROMIUM = "/usr/bin/chromium"
"""Debian's; Playwright's own would be downloaded."""


@dataclass
class Watched:
    """What went wrong in the pages of a test.

    Attributes:
        errors: Console errors, reports of the content policy, uncaught errors, dialogs.
        allowed: Beginnings of errors that the test provokes.
        over: True after the test.
    """

    errors: list[str] = field(default_factory=list)
    allowed: list[str] = field(default_factory=list)
    over: bool = False

    def page(self, page: Any) -> None:
        """Watch one page."""
        page.on("pageerror", lambda error: self.errors.append(f"error: {error}"))
        page.on("dialog", self._dialog)
        page.on("console", lambda said: self._said(said, page))

    def _dialog(self, dialog: Any) -> None:
        self.errors.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    def _said(self, said: Any, page: Any) -> None:
        bad = said.type in ("error", "warning") and not self.over
        if bad and not said.text.startswith(tuple(self.allowed)):
            self.errors.append(f"{page.url}: {said.text}")


def press(page: Any, role: str, name: Any) -> None:
    """Click a button or a link, and wait for the page that follows."""
    with page.expect_navigation():
        page.get_by_role(role, name=name).first.click()


def violations(page: Any) -> list[str]:
    """What axe finds serious or critical."""
    found = Axe().run(page).response["violations"]
    return [
        f"{page.url}: {each['id']}: {[node['html'] for node in each['nodes']][:3]}"
        for each in found
        if each["impact"] in ("serious", "critical")
    ]


def without_script(context: Any) -> None:
    """Let pages come as they are without JavaScript, which axe itself needs."""
    context.route("**/page.js", lambda route: route.fulfill(response=route.fetch(), body=""))


def sideways(page: Any) -> int:
    """By how many pixels the page is wider than its window."""
    return int(
        page.evaluate(
            "() => document.documentElement.scrollWidth - document.documentElement.clientWidth"
        )
    )
