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
# From the sentence that you forward to the letters that can go again. The letters come from
# `celery -A shop dlq export letters/`, and a sample of the messages that succeeded from
# `celery -A shop dlq export successes/ --successes`. Nothing here touches Redis or the broker; the
# redrive is the last step, and only shown.
#
# Every function takes a DataFrame of letters and returns a DataFrame, so that each answer can be
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
from celery_dlq.spark.charts import COLOURS
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
# files fit together, and reads a folder without letters as well; `triage.letters` refuses it.
#
# Messages that succeeded are the best to compare with: other letters died as well, each of its own
# cause. Workers keep a sample of them with `dlq_sample_successes`.

# %%
letters = triage.scan(spark, LETTERS).drop("body", "traceback").cache()
overview = triage.overview(letters).cache()
overview.show(truncate=False)
try:
    good = triage.successes(spark, SUCCESSES).drop("body", "traceback").cache()
except ExportError as none:
    good = None
    print(none)

# %% [markdown]
# ## The sentences
#
# A fingerprint is computed when a letter is written: exception type, task and the innermost
# frames of the application. Letters with one fingerprint died of one cause. `explain` says of each
# cause since when it is there, whether it goes on, and what its letters have that others lack. At
# most 2,000 letters of a cause are looked at; all are counted.

# %%
causes = triage.explain(letters, good).cache()
headlines = causes.where("kind = 'headline'").limit(20).collect()
for one in headlines:
    print(f"{one.fingerprint}  letters: {one.of_letters:,}\n   {one.text}")
explained, known = causes.where("kind = 'headline'").count(), overview.first().causes
print(f"{explained:,} of {known:,} causes have letters enough for a sentence.")

# %% [markdown]
# ## What the sentences rest on
#
# The numbers of each finding: so many of these letters have the value, and so many of the others.
# `q_value` is the probability that chance makes such a difference somewhere, corrected for all that
# was tested. A correlation is a lead, not a proof, but it is the line of code to read first.

# %%
findings = causes.where("against IS NOT NULL")
evidence = ["feature", "value", "against", "letters", "of_letters", "others", "of_others"]
findings.select("fingerprint", *evidence, "q_value").show(truncate=24)
for row in causes.where("kind = 'note'").limit(10).collect():
    print(f"{row.fingerprint[:8]}  {row.text}")

# %%
bars = findings.limit(12).collect()
figure, axes = plt.subplots(figsize=(9, 0.8 + 0.45 * len(bars)), layout="constrained")
places = range(len(bars))
for shift, shares, label, colour in (
    (-0.2, [row.share_here for row in bars], "its letters", COLOURS["new"]),
    (0.2, [row.share_elsewhere for row in bars], "the others", COLOURS["smaller"]),
):
    axes.barh([place + shift for place in places], shares, 0.38, label=label, color=colour)
axes.set_yticks(
    list(places), [f"{row.feature} = {row.value[:40]}\n{row.fingerprint[:8]}" for row in bars]
)
axes.set(xlim=(0, 1), ylim=(max(len(bars), 1) - 0.5, -0.5))
if bars:
    axes.legend(frameon=False, loc="lower right")

# %% [markdown]
# ## When
#
# Letters over time, of the largest causes. The width of a bucket follows from the time that the
# letters span. New are the causes that began in its second half.

# %%
first, last = letters.selectExpr(  # 0: no letter has a time
    "coalesce(min(unix_micros(dead_lettered_at)), 0)",
    "coalesce(max(unix_micros(dead_lettered_at)), 0)",
).first()
bucket = triage.bucket_for((last - first) / 1e6)
middle = from_micros(first + (last - first) // 2)
news = {row.fingerprint for row in triage.new_since(letters, middle).limit(100).collect()}
names = [one.fingerprint for one in headlines[:5]]
width = triage.bucket_width(bucket)
micros = int(width.total_seconds() * 1_000_000)
counted = (
    letters.where(letters["fingerprint"].isin(names) & letters["dead_lettered_at"].isNotNull())
    .selectExpr("fingerprint", f"unix_micros(dead_lettered_at) DIV {micros} AS place")
    .groupBy("fingerprint", "place")
    .count()
    .collect()
)
figure, rows = plt.subplots(
    max(len(names), 1), sharex=True, squeeze=False, figsize=(9, 0.8 + 1.1 * len(names))
)
for axes, name in zip(rows[:, 0], names, strict=False):
    own = [row for row in counted if row.fingerprint == name]
    axes.bar(
        [from_micros(row.place * micros) for row in own],
        [row[2] for row in own],
        width=width,
        align="edge",
        edgecolor="white",
        color=COLOURS["new" if name in news else "known"],
    )
    axes.set_title(f"{name}, letters per {bucket.removeprefix('1 ')}", loc="left", size=9)
figure.autofmt_xdate()

# %% [markdown]
# ## Of what, and after how many deliveries
#
# `max_deliveries_exceeded` is a message that took its worker down again and again; `failed` is an
# exception that nobody caught. `limits` says on which delivery messages succeed, and what share of
# the successes a limit there loses at most; it advises `max_deliveries` where thousands of
# successes were sampled. Without a sample it only shows how far messages came.

# %%
triage.reasons(letters).show(truncate=False)
triage.limits(letters, good).drop("share", "cumulative_share").show()

# %% [markdown]
# ## Redrive these
#
# A decision is a row: which letter, and redrive or discard. Once the shop has the rate in its code,
# the orders in that currency can run again; the image that kills workers cannot. `died_again` has
# what earlier redrives of a cause came to.

# %%
causes.where("redriven IS NOT NULL").select("fingerprint", "died_again", "redriven").show()
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
