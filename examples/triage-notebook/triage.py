# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # What is dying, and why
#
# A walk through the dead letters of a Celery app, from "how many" to "which orders, and what
# to do with them". The letters come from `celery -A shop dlq export letters/`, and a sample of the
# messages that succeeded from `celery -A shop dlq export successes/ --successes`; nothing here
# touches Redis or the broker before the very last step, which is only shown.
#
# Every function takes a DataFrame of letters and gives a DataFrame, so that each answer can be
# joined, filtered and kept like any other table. Needs: `pip install '../..[spark]'`.

# %% tags=["parameters"]
import os

LETTERS = os.environ.get("LETTERS", "letters")
SUCCESSES = os.environ.get("SUCCESSES", "successes")  # empty: no sample is recorded

# %%
import matplotlib.pyplot as plt

from celery_dlq.errors import ExportError
from celery_dlq.letters.record import from_micros
from celery_dlq.spark import triage
from celery_dlq.spark.charts import COLOURS, OTHER
from celery_dlq.spark.session import local_session

spark = local_session("triage")  # on a cluster: your own session
plt.rcParams.update(
    {
        "figure.figsize": (9, 2.8),
        "figure.dpi": 80,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "text.parse_math": False,  # a value may have dollar signs
    }
)

# %% [markdown]
# ## The letters
#
# One row a letter, the columns of the record. `triage.scan` fixes the types, so that old and new
# files fit together, and reads a folder without letters as well; `triage.letters` refuses it. Only
# the columns that the triage needs are kept in memory: never bodies or tracebacks.

# %%
letters = triage.scan(spark, LETTERS).drop("body", "traceback", "headers").cache()
triage.overview(letters).show(truncate=False)

# %% [markdown]
# ## Causes
#
# A fingerprint is computed when a letter is written: exception type, task and the innermost
# frames of the application. Letters with one fingerprint died of one cause.

# %%
groups = triage.groups(letters)
groups.select("fingerprint", "letters", "task_name", "exception_type", "main_reason").show(
    truncate=40
)
groups.select("fingerprint", "example_description").show(truncate=90)

# %% [markdown]
# ## When
#
# The width of a bucket follows from the time that the letters span.

# %%
first, last = letters.selectExpr(  # 0: no letter has a time
    "coalesce(min(unix_micros(dead_lettered_at)), 0)",
    "coalesce(max(unix_micros(dead_lettered_at)), 0)",
).first()
bucket = triage.bucket_for((last - first) / 1e6)
timeline = triage.timeline(letters, bucket)
rows = timeline.selectExpr("unix_micros(bucket_start) AS at", "reason", "letters").collect()

figure, axes = plt.subplots()
width = triage.bucket_width(bucket)
floor: dict[int, int] = {}
for reason in sorted({row.reason for row in rows}):
    for row in (row for row in rows if row.reason == reason):
        axes.bar(
            from_micros(row.at),
            row.letters,
            width=width,
            align="edge",
            edgecolor="white",
            bottom=floor.get(row.at, 0),
            color=COLOURS.get(reason, OTHER),
        )
        floor[row.at] = floor.get(row.at, 0) + row.letters
    axes.bar([from_micros(first)], [0], color=COLOURS.get(reason, OTHER), label=reason)
axes.set_ylabel(f"letters per {bucket.removeprefix('1 ')}")
if rows:
    axes.legend(frameon=False)
figure.autofmt_xdate()
# %% [markdown]
# ## Of what, and after how many deliveries
#
# `max_deliveries_exceeded` is a message that took its worker down again and again; `failed` is an
# exception that nobody caught.

# %%
triage.reasons(letters).show(truncate=False)
triage.deliveries_before_death(letters).show()

# %% [markdown]
# ## What is new
#
# Causes that were never seen before a moment, say the last release, or that came back after a
# quiet time. Here the moment is a fifth of the time from the first letter on, so that the picture
# has something to tell. Floods are buckets far above what their cause had before.

# %%
release = from_micros(first + (last - first) // 5)
triage.new_since(letters, release).select("fingerprint", "kind", "letters", "task_name").show()
triage.spikes(letters, bucket).select("fingerprint", "task_name", "letters", "expected").show()

# %% [markdown]
# ## Why
#
# Which values do the letters of a cause have that others lack? Each value of each argument is a
# suspect, and so are release, queue and host. The significance (Fisher's exact test) is corrected
# for the number of suspects, so that a long list of arguments does not make a culprit by chance.
#
# There are two to compare with: other letters of the same task, and messages that succeeded, of
# which the workers keep a sample (`dlq_sample_successes`). Here they are the two largest causes
# with an exception. What all letters of a cause share comes first, then what is more frequent in
# them than in others, then what they were compared with, and what that leaves open.

# %%
try:
    good = triage.successes(spark, SUCCESSES).drop("body", "traceback").cache()
except ExportError as none:
    good = None
    print(none)
known = groups.where("exception_type IS NOT NULL AND fingerprint != 'unknown'")
why = {
    f"{one.exception_type} {one.fingerprint[:8]}": (
        triage.why(letters, one.fingerprint, good).collect()
    )
    for one in known.limit(2).collect()
}
for cause, found in why.items():
    print(cause)
    for row in found:
        chance = f"   chance {row.q_value:.0e}" if row.against else ""
        print(f"   {row.text}{chance}")

# %%
bars = [(cause, row) for cause, found in why.items() for row in found if row.against]
compared = sorted({row.against for _, row in bars})
most = max((sum(row.against == name for _, row in bars) for name in compared), default=0)
figure = plt.figure(figsize=(10, 0.8 + 0.45 * most), layout="constrained")
for place, against in enumerate(compared, 1):
    axes = figure.add_subplot(1, len(compared), place)
    shown = [(cause, row) for cause, row in bars if row.against == against]
    labels = [
        f"{row.feature} = {row.value[:40]}\n{cause.rpartition('.')[2]}" for cause, row in shown
    ]
    places = range(len(shown))
    axes.barh(
        [p - 0.2 for p in places], [row.support for _, row in shown], 0.38, label="its letters"
    )
    axes.barh(
        [p + 0.2 for p in places],
        [row.share_of_others for _, row in shown],
        0.38,
        label=against,
        color=OTHER,
    )
    axes.set_yticks(list(places), labels)
    axes.set_title(f"against {against}")
    axes.set(xlim=(0, 1), ylim=(most - 0.5, -0.5))
    axes.legend(frameon=False, loc="lower right")
# %% [markdown]
# In the shop there is no exchange rate for one currency, and the declined cards come from one
# provider. Against other letters there are more bars, which follow from these two: both causes have
# the same task, so what one has, the other lacks. Against what succeeded only the two are left,
# which is why a sample of successes is worth its few bytes. A lead, not a proof, but it is the line
# of code to read first.

# %% [markdown]
# ## Limits
#
# `limits` says on which delivery messages succeed, and what share of the successes a limit there
# loses at most; it advises `max_deliveries` where thousands of successes were sampled. Without a
# sample it only shows how far messages came.

# %%
triage.limits(letters, good).drop("share", "cumulative_share").show()

# %% [markdown]
# ## Decide
#
# A decision is a row: which letter, and redrive or discard. Once the shop has the rate in its code,
# the orders in that currency can run again; the image that kills workers cannot.

# %%
decisions = letters.selectExpr(
    "dead_letter_queue",
    "id",
    "CASE WHEN get_json_object(kwargs_json, '$.currency') = 'CHF' THEN 'redrive'"
    " WHEN reason = 'max_deliveries_exceeded' THEN 'discard' END AS action",
).where("action IS NOT NULL")
decisions.groupBy("action").count().orderBy("action").show()

# %% [markdown]
# The app carries it out, as `celery dlq redrive` and `discard` do; it is not run here:
#
# ```python
# from shop import dlq
#
# by_action = {action: set() for action in ("redrive", "discard")}
# for row in decisions.collect():
#     by_action[row.action].add(row.id)
# dlq.redrive("orders-DLQ", ids=frozenset(by_action["redrive"]))
# dlq.discard("orders-DLQ", ids=frozenset(by_action["discard"]))
# ```
