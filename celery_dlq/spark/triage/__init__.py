"""Questions about the letters of an exported folder, answered by Spark SQL.

Most functions take a DataFrame of letters and return a lazy DataFrame; `explain` answers at once.
All but `explain` are plain Spark SQL, without Python on the executors.
They read only the columns they name: never ``body`` or ``traceback``. Times are in UTC whatever
the session's time zone is. Values that a foreign writer left empty count as ``unknown``.

>>> spark = local_session()  # doctest: +SKIP
>>> groups(letters(spark, "letters/")).show()  # doctest: +SKIP
"""

from __future__ import annotations

from celery_dlq.spark.triage.arguments import arguments
from celery_dlq.spark.triage.changes import changes
from celery_dlq.spark.triage.evidence import explain
from celery_dlq.spark.triage.questions import (
    COLUMNS,
    deliveries_before_death,
    groups,
    letters,
    limits,
    overview,
    reasons,
    scan,
    successes,
    timeline,
)
from celery_dlq.spark.triage.trends import (
    bucket_for,
    bucket_width,
    new_since,
    spikes,
)

__all__ = [
    "COLUMNS",
    "arguments",
    "bucket_for",
    "bucket_width",
    "changes",
    "deliveries_before_death",
    "explain",
    "groups",
    "letters",
    "limits",
    "new_since",
    "overview",
    "reasons",
    "scan",
    "spikes",
    "successes",
    "timeline",
]
