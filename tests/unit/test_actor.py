"""Who acts: the process's user, or the one on whose behalf it acts."""

from __future__ import annotations

import threading

from celery_dlq.events import acting_as, on_behalf_of, process_user, whoami


def test_without_a_block_the_user_of_the_process_acts() -> None:
    """As on the command line."""
    assert whoami() == process_user()
    assert "@" in whoami()


def test_a_user_of_the_page_is_named_with_the_process() -> None:
    """Until the block ends; blocks may be nested."""
    with acting_as("ann"):
        assert whoami() == f"ann via {process_user()}"
        with acting_as(" bob "):
            assert whoami() == f"bob via {process_user()}"
        assert whoami() == f"ann via {process_user()}"
        with on_behalf_of("eve via web@elsewhere"):
            assert whoami() == "eve via web@elsewhere"
    assert whoami() == process_user()


def test_other_threads_act_for_themselves() -> None:
    """Two requests at once do not exchange their users."""
    seen: list[str] = []
    with acting_as("ann"):
        thread = threading.Thread(target=lambda: seen.append(whoami()))
        thread.start()
        thread.join()
    assert seen == [process_user()]


def test_a_hostile_name_neither_forges_a_line_nor_fills_the_audit() -> None:
    """A proxy may pass on what anyone has typed."""
    with acting_as("a\x1b[2J\n\u202eb\udc80" + "c" * 5000):
        name, via, process = whoami().partition(" via ")
    assert name.startswith("a\\x1b[2J\\n\\u202eb\\udc80ccc")
    assert (len(name), via, process) == (100, " via ", process_user())
    with acting_as("  "):
        assert whoami() == process_user()
