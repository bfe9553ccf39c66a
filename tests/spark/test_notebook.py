"""The triage notebook, run on letters that a real worker stored a moment ago, and on any others."""

from __future__ import annotations

import importlib
import json
import re
import runpy
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import planted
import pytest
from celery import _state
from java import interpreted
from servers import RedisServer
from waiting import poll

from celery_dlq.demo import worker
from celery_dlq.store.keys import Keys

if TYPE_CHECKING:
    from conftest import Export
    from pyspark.sql import SparkSession

EXAMPLE = Path(__file__).parents[2] / "examples" / "triage-notebook"

# What the shop's letters must show, asked in the notebook's own terms.
CHECK = """
found = {(row.feature, row.value) for row in bars if row.kind == "value"}
assert found == {("kwargs.currency", "CHF"), ("kwargs.provider", "lastpay")}, bars
assert {row.against for row in bars} == {"successes"}
assert last - first < 86_400_000_000
assert {row.action for row in decisions.collect()} == {"redrive", "discard"}
"""

pytestmark = pytest.mark.usefixtures("pyspark")


@pytest.fixture
def shop(monkeypatch: pytest.MonkeyPatch, redis_server: RedisServer) -> Iterator[ModuleType]:
    """The example's app, on an empty Redis, for us and for its worker."""
    redis_server.client().flushall()
    monkeypatch.setenv("SHOP_REDIS", redis_server.url)
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLE))
    monkeypatch.syspath_prepend(str(EXAMPLE))
    # Its tasks are shared, so they would come with every app that a later test makes.
    monkeypatch.setattr(_state, "_on_app_finalizers", set(_state._on_app_finalizers))
    sys.modules.pop("shop", None)
    module = importlib.import_module("shop")
    yield module
    module.dlq.close()
    module.app.close()
    sys.modules.pop("shop", None)


def export(shop: ModuleType, folder: Path, redis_server: RedisServer) -> None:
    """Let a real worker write what cannot be done, then write it and the rest to Parquet."""
    deaths = shop.publish()
    successes = shop.ORDERS + 1 - deaths
    client, samples = redis_server.client(), Keys().samples("orders-DLQ")
    with worker("shop", ["orders"], folder / "worker.log") as process:

        def done() -> bool:
            dead = sum(queue.letters for queue in shop.dlq.queues())
            return dead >= deaths and client.xlen(samples) >= successes

        poll(lambda: done() or process.poll() is not None, timeout_seconds=120)
        assert done(), (folder / "worker.log").read_text("utf-8")
    assert shop.dlq.export(folder / "letters").letters == deaths
    assert shop.dlq.export(folder / "successes", successes=True).letters == successes


def test_notebook_runs_on_letters_of_a_real_worker(
    shop: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, redis_server: RedisServer
) -> None:
    """Every cell runs from top to bottom, and the last one checks what was found."""
    jupytext = pytest.importorskip("jupytext")
    client = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    import nbformat

    export(shop, tmp_path, redis_server)
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    for name, value in interpreted(tmp_path).items():
        monkeypatch.setenv(name, value)
    notebook = jupytext.read(EXAMPLE / "triage.py")
    notebook.cells.append(nbformat.v4.new_code_cell(CHECK))
    resources = {"metadata": {"path": str(tmp_path)}}
    client.NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources=resources, store_widget_state=False
    ).execute()
    notebook.cells.pop()
    nbformat.write(notebook, tmp_path / "triage.ipynb")
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert not [output for output in outputs if output.output_type == "error"]
    pictures = [output for output in outputs if "image/png" in output.get("data", {})]
    assert len(pictures) >= 2
    text = "".join(output.get("text", "") for output in outputs)
    assert re.search(r"[0-9a-f]{16}  letters: \d+\n   .*kwargs\.currency = CHF", text), text
    first_picture = next(
        number for number, one in enumerate(outputs) if "image/png" in one.get("data", {})
    )
    assert any("= CHF" in one.get("text", "") for one in outputs[:first_picture])
    assert str(tmp_path) not in text


def of_causes(count: int, causes: int) -> Iterator[dict[str, Any]]:
    """Letters of so many causes; those of the first one have a price with dollar signs."""
    letters = planted.letters(count * 2)
    for number, letter in enumerate(islice(letters, count)):
        price = "free" if number % causes else "costs $5_$ or more"
        kwargs = json.dumps({"price": price, **json.loads(letter["kwargs_json"])})
        yield {**letter, "fingerprint": f"{number % causes:016}", "kwargs_json": kwargs}


@pytest.mark.parametrize(
    ("letters", "causes", "successes"),
    [
        (0, 1, 0),  # nothing to explain, nothing to draw
        (60, 1, 200),  # compared with successes alone
        (3_000, 3_000, None),  # letters, and no cause with a sentence
    ],
    ids=["no letters", "one cause", "3,000 causes and no sample"],
)
def test_notebook_runs_on_any_export(
    spark: SparkSession,
    export: Export,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    letters: int,
    causes: int,
    successes: int | None,
) -> None:
    """Every cell runs though nothing stands out, or nothing is there; a missing sample is said."""
    pyplot = pytest.importorskip("matplotlib.pyplot")
    folder = export([])
    planted.write(of_causes(letters, causes), folder)
    monkeypatch.setenv("LETTERS", str(folder))
    monkeypatch.setenv("SUCCESSES", str(tmp_path / "successes"))
    if successes is not None:
        good = ({**row, "reason": "succeeded"} for row in of_causes(successes, 2))
        planted.write(good, tmp_path / "successes")
    with pyplot.rc_context():
        runpy.run_path(str(EXAMPLE / "triage.py"))
        for number in pyplot.get_fignums():
            pyplot.figure(number).savefig(tmp_path / f"{number}.png")  # as Jupyter draws it
    pyplot.close("all")
    spark.catalog.clearCache()
    said = capsys.readouterr().out
    assert f"|{letters} " in said
    assert ("costs $5_$ or more" in said) == (successes == 200)
    assert ("to hold letters, got none" in said) == (successes == 0)
    assert ("got no such folder" in said) == (successes is None)


def test_committed_notebook_is_that_of_the_source() -> None:
    """The executed notebook shows the cells of the script, in order, all run without error."""
    jupytext = pytest.importorskip("jupytext")
    shown = jupytext.read(EXAMPLE / "triage.ipynb")
    source = jupytext.read(EXAMPLE / "triage.py")
    assert [c.source for c in shown.cells] == [c.source for c in source.cells]
    code = [cell for cell in shown.cells if cell.cell_type == "code"]
    assert all(cell.execution_count for cell in code)
    assert not [o for cell in code for o in cell.outputs if o.output_type == "error"]
