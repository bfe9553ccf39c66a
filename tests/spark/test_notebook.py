"""The triage notebook, run on letters that a real worker stored a moment ago."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from celery import _state
from servers import RedisServer
from waiting import poll

from celery_dlq.backends.redis.keys import Keys
from celery_dlq.demo.processes import worker

EXAMPLE = Path(__file__).parents[2] / "examples" / "triage-notebook"

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
    # Each query runs once: not worth the thorough compiler's time.
    monkeypatch.setenv("JDK_JAVA_OPTIONS", "-XX:TieredStopAtLevel=1")
    notebook = jupytext.read(EXAMPLE / "triage.py")
    resources = {"metadata": {"path": str(tmp_path)}}
    client.NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources=resources, store_widget_state=False
    ).execute()
    nbformat.write(notebook, tmp_path / "triage.ipynb")
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert not [output for output in outputs if output.output_type == "error"]
    pictures = [output for output in outputs if "image/png" in output.get("data", {})]
    assert len(pictures) >= 2
    text = "".join(output.get("text", "") for output in outputs)
    for said in ("KeyError, against same tasks", "KeyError, against successes"):
        _before, _letter_summary, findings = text.partition(f"{said}\n")
        assert findings.lstrip().startswith("kwargs.currency = CHF"), text
    assert str(tmp_path) not in text


def test_committed_notebook_is_that_of_the_source() -> None:
    """The executed notebook shows the cells of the script, in order, all run without error."""
    jupytext = pytest.importorskip("jupytext")
    shown = jupytext.read(EXAMPLE / "triage.ipynb")
    source = jupytext.read(EXAMPLE / "triage.py")
    assert [c.source for c in shown.cells] == [c.source for c in source.cells]
    code = [cell for cell in shown.cells if cell.cell_type == "code"]
    assert all(cell.execution_count for cell in code)
    assert not [o for cell in code for o in cell.outputs if o.output_type == "error"]
