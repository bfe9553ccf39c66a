"""Tell Slack, or any webhook, of dead letters: one message per cause and minute.

Receivers of Celery signals run in the worker's main process, so the HTTP call happens in a thread,
and what it cannot keep up with is counted and dropped. Nothing is sent about arguments.
"""

import json
import logging
import queue
import threading
import time
import urllib.request

from celery_dlq.signals import task_dead_lettered

logger = logging.getLogger(__name__)

MOST_LETTERS = 1_000
MOST_CAUSES = 1_000


class Announcer:
    """Posts to a webhook from a thread of its own."""

    def __init__(self, url, *, pause_seconds=60.0, timeout_seconds=5.0):
        self.url = url
        self.pause_seconds = pause_seconds
        self.timeout_seconds = timeout_seconds
        self.letters = queue.Queue(maxsize=MOST_LETTERS)
        self.dropped = 0
        self._thread = None

    def __call__(self, letter, **_):
        if self._thread is None:  # not at import: a thread does not survive the worker's fork
            self._thread = threading.Thread(target=self.run, daemon=True, name="dead-letters")
            self._thread.start()
        try:
            self.letters.put_nowait(letter)
        except queue.Full:
            self.dropped += 1

    def run(self):
        announced = {}  # cause to (when, letters since)
        while True:
            letter = self.letters.get()
            when, more = announced.get(letter.fingerprint, (None, 0))
            if when is not None and time.monotonic() - when < self.pause_seconds:
                announced[letter.fingerprint] = (when, more + 1)
                continue
            if len(announced) > MOST_CAUSES:
                announced.clear()
            announced[letter.fingerprint] = (time.monotonic(), 0)
            self.post(text_of(letter, more))

    def post(self, text):
        body = json.dumps({"text": text}).encode()
        headers = {"Content-Type": "application/json"}
        try:
            request = urllib.request.Request(self.url, body, headers)  # noqa: S310 - yours
            with urllib.request.urlopen(request, timeout=self.timeout_seconds):  # noqa: S310
                pass
        except (OSError, ValueError) as exc:  # without the address: it is a secret
            logger.warning("A dead letter could not be announced: %s", exc)


def text_of(letter, more):
    """What people read."""
    cause = letter.exception_type or letter.reason.value
    since = f" ({more} more like it since the last message)" if more else ""
    return (
        f"*{letter.task_name}* died after {letter.deliveries} deliveries: {cause}: "
        f"{letter.description[:200]}{since}\n"
        f"`celery dlq show {letter.id}` in {letter.dead_letter_queue}"
    )


def announce_to(url, **options):
    """Announce every cause from now on."""
    announcer = Announcer(url, **options)
    task_dead_lettered.connect(announcer, weak=False)
    return announcer
