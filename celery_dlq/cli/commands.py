"""``celery -A proj dlq …``: what operators do with dead letters.

Every ``celery`` command imports this module, so it imports click and nothing
else at the top.
"""

from __future__ import annotations

from typing import Any

import click

from celery_dlq.cli import adopting, changing, data, jobs, policies, reading
from celery_dlq.cli.exporter import exporter
from celery_dlq.errors import DLQError
from celery_dlq.letters.printable import one_line


class PlainErrors(click.Group):
    """ExportLeases our errors into one line on stderr and exit code 1."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except DLQError as exc:
            raise click.ClickException(one_line(str(exc))) from exc


@click.group(cls=PlainErrors)
def dlq() -> None:
    """Inspect, redrive, export and triage dead letters."""


for _command in (
    reading.queues,
    reading.list_,
    reading.show,
    reading.groups,
    reading.tail,
    reading.audit,
    changing.redrive,
    changing.discard,
    changing.purge,
    changing.restore,
    jobs.jobs,
    adopting.import_,
    data.export,
    data.triage,
    policies.policies,
    policies.trim,
    exporter,
):
    dlq.add_command(_command)
