"""pip finds versions of everything beside what other projects pin; nothing is installed."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PINS = {
    # What pretix 2026.8 asks for: kombu's own extra allows redis-py below 6.5 only.
    "pretix": (
        *("celery==5.6.*", "kombu==5.6.*", "redis==7.4.*", "django-redis==7.0.*"),
        *("packaging", "python-dateutil==2.9.*"),
    ),
    # What Superset 6.1 asks for, with the versions of its images where they are known.
    "superset": (
        *("redis>=5.0.0,<6.0", "celery==5.5.2", "kombu==5.5.3", "vine==5.1.0", "billiard==4.2.1"),
        *("amqp==5.3.1", "click==8.2.1", "packaging==25.0", "rich==13.9.4", "tzdata==2025.2"),
    ),
    "newest": ("celery==5.7.*", "kombu==5.7.*", "redis==8.*", "packaging>=26.4"),
    "oldest": ("celery==5.4.0", "kombu==5.4.0", "redis==5.0.1", "packaging==21.3", "click==8.1.8"),
}
_NO_NETWORK = ("Failed to establish a new connection", "Temporary failure in name resolution")


@pytest.fixture(scope="module")
def pip(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A pip in an environment without any other package."""
    folder = tmp_path_factory.mktemp("fresh")
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    return [str(folder / "bin/python"), "-m", "pip", "--disable-pip-version-check", "--no-input"]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What pip needs in order to read the requirements of celery_dlq."""
    folder = tmp_path_factory.mktemp("project")
    for name in ("setup.py", "README.md", "LICENSE", "celery_dlq/__init__.py"):
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    return folder


@pytest.mark.parametrize("pins", PINS.values(), ids=PINS)
def test_pip_finds_versions_beside_the_pins(
    pip: list[str], project: Path, tmp_path: Path, pins: tuple[str, ...]
) -> None:
    """Nothing of ours, nor an extra of kombu's or Celery's, excludes what the project runs."""
    report = tmp_path / "report.json"
    command = [*pip, "install", "--dry-run", "--quiet", "--report", str(report)]
    done = subprocess.run(
        [*command, str(project), *pins], capture_output=True, text=True, check=False, timeout=300
    )
    if done.returncode and any(text in done.stderr for text in _NO_NETWORK):
        pytest.skip("pip reaches no package index")
    assert done.returncode == 0, done.stderr
    names = (one["metadata"]["name"] for one in json.loads(report.read_text())["install"])
    found = {name.replace("_", "-") for name in names}  # some versions of setuptools do so, too
    assert {"celery-dlq", "celery", "kombu", "redis", "hiredis", "packaging", "rich"} <= found
