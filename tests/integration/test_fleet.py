"""A small fleet of the real transport: a message costs Redis the same with more workers."""

from __future__ import annotations

from program_runs import run_program

SIZE = ("--seconds", "2", "--messages", "40", "--processes", "2", "--turns", "1")


def rows(*options: str) -> dict[str, list[str]]:
    """What the program prints of a fleet of guarded workers, by phase."""
    done = run_program("fleet", "--kinds", "guarded", *SIZE, *options)
    assert done.returncode == 0, done.stderr
    cells = [[cell.strip() for cell in row.split("|")] for row in done.stdout.splitlines()[2:]]
    return {row[2]: row for row in cells}


def test_each_message_wakes_one_worker_however_many_wait() -> None:
    """The books of the program balance, also when half of the workers hang or are killed."""
    few, many = rows("--workers", "4"), rows("--workers", "40")
    for phase in ("20 a second", "300 a second"):
        assert int(many[phase][4]) <= 1.5 * int(few[phase][4]) + 5, (few, many)
    assert {"half stand still", "half killed", "Redis killed"} <= {*many}
