"""The Lua scripts: their headers are a contract with Python."""

from __future__ import annotations

import re
from enum import Enum
from importlib.resources import files

import pytest

from celery_dlq.store import scripts
from celery_dlq.store.claims import ClaimState
from celery_dlq.store.counter import SCRIPTS
from celery_dlq.store.letters import Restored
from celery_dlq.store.scripts import MOST_IDS
from celery_dlq.store.worker_records import CountStatus, Stored
from celery_dlq.transport.redis.broker import SCRIPTS as TRANSPORT

REPLIES: dict[str, type[Enum]] = {
    "count": CountStatus,
    "dead_letter": Stored,
    "claim": ClaimState,
    "redrive": ClaimState,
    "restore": Restored,
}
"""What the numbers mean that a script replies."""


def names_in(package: str) -> list[str]:
    """The names of a package's scripts."""
    return sorted(
        path.name.removesuffix(".lua")
        for path in files(package).joinpath("lua").iterdir()
        if path.name.endswith(".lua")
    )


STORE = "celery_dlq.store"
FEATURES = sorted(
    f"celery_dlq.features.{folder.name}"
    for folder in files("celery_dlq.features").iterdir()
    if folder.is_dir() and folder.joinpath("lua").is_dir()
)
NAMES = [
    f"{package}:{name}" for package in (STORE, TRANSPORT, *FEATURES) for name in names_in(package)
]
MOST_LINES = 60


def source(name: str) -> str:
    """The text of a script, given as ``package:name``."""
    package, _, script = name.partition(":")
    return scripts.script_source(script, package)


def header(name: str) -> dict[str, str]:
    """The parts of a script's header comment, continued lines joined."""
    parts: dict[str, str] = {}
    title = ""
    for line in source(name).splitlines():
        if not line.startswith("--"):
            break
        found = re.match(r"-- (\w+): ?(.*)", line)
        if found:
            title, text = found.groups()
        else:
            text = line.removeprefix("--")
        parts[title] = f"{parts.get(title, '')} {text.strip()}".strip()
    return parts


def body(name: str) -> str:
    """The code of a script with its shared parts, without comments."""
    package, _, script = name.partition(":")
    return re.sub(r"--.*", "", scripts.whole_script(script, package))


def numbers(text: str) -> set[int]:
    """The numbers with which the entries of a KEYS or ARGV list begin."""
    return {int(n) for n in re.findall(r"(?:^|\s)(\d+)(?:\.\.\.)? [a-z_]+", text)}


@pytest.mark.parametrize("package", [STORE, *FEATURES])
def test_python_uses_exactly_the_scripts_of_a_package(package: str) -> None:
    """No script is forgotten, none is missing: the client has them, or the counter's connection."""
    modules = [path for path in files(package).iterdir() if path.name.endswith(".py")]
    text = "".join(path.read_text("utf-8") for path in modules)
    used = {
        *re.findall(r'(?:self\._run_script|_written|self\._command|script_text)\(\s*"(\w+)"', text)
    }
    used |= set(SCRIPTS) if package == STORE else set()
    assert sorted(used) == names_in(package)


def test_the_transport_sends_exactly_the_scripts_of_its_package() -> None:
    """It gets them by name, with the name of its package."""
    modules = [path for path in files(TRANSPORT).iterdir() if path.name.endswith(".py")]
    sent = {
        name
        for path in modules
        for name in re.findall(r'script_text\("(\w+)", SCRIPTS\)', path.read_text("utf-8"))
    }
    assert sorted(sent) == names_in(TRANSPORT)


@pytest.mark.parametrize("name", NAMES)
def test_a_script_is_short(name: str) -> None:
    """One script is one idea."""
    assert len(source(name).splitlines()) <= MOST_LINES


@pytest.mark.parametrize("name", NAMES)
def test_a_script_says_what_it_does_takes_and_returns(name: str) -> None:
    """Every header has the same five parts in the same order."""
    assert list(header(name)) == ["Purpose", "KEYS", "ARGV", "Returns", "Complexity"]
    assert all(header(name).values())


@pytest.mark.parametrize("name", NAMES)
def test_the_keys_of_a_script_are_documented(name: str) -> None:
    """Each ``KEYS[n]`` is used, also by a part, and is in the header with the type of its value."""
    used = {int(n) for n in re.findall(r"(?:KEYS\[|= add_entry\()(\d+)", body(name))}
    documented = re.findall(
        r"(\d+) \w+ \((hash|stream|set|zset|string|list)\)", header(name)["KEYS"]
    )
    assert used == {int(n) for n, _type in documented}
    assert used == set(range(1, len(used) + 1))


@pytest.mark.parametrize("name", NAMES)
def test_the_arguments_of_a_script_are_documented(name: str) -> None:
    """Each ``ARGV[n]`` is in the header."""
    used = {int(n) for n in re.findall(r"ARGV\[(\d+)\]", body(name))}
    assert used <= numbers(header(name)["ARGV"])


@pytest.mark.parametrize("name", NAMES)
def test_replies_are_the_same_in_lua_and_in_python(name: str) -> None:
    """Every constant of a header is in Python's enumeration, and the other way round."""
    in_lua = {word: int(n) for n, word in re.findall(r"(\d+) = ([A-Z_]+)", header(name)["Returns"])}
    in_python = {
        reply.name: reply.value for reply in REPLIES.get(name.removeprefix(f"{STORE}:"), ())
    }
    assert in_lua == in_python


@pytest.mark.parametrize("name", NAMES)
def test_a_script_touches_only_its_keys(name: str) -> None:
    """The first argument of every Redis command is one of KEYS, and nothing walks all keys."""
    for command, rest in re.findall(r"redis\.p?call\('(\w+)'\s*(?:,\s*([^,)\s]+))?", body(name)):
        if command not in {"TIME", "SELECT"}:
            assert re.fullmatch(r"KEYS\[(\d+|[a-z]+)\]|unpack\(KEYS|key", rest), (command, rest)
        assert command not in {"KEYS", "SCAN", "FLUSHDB", "FLUSHALL"}


@pytest.mark.parametrize("name", NAMES)
def test_a_function_that_takes_a_key_gets_one_of_the_scripts(name: str) -> None:
    """A parameter named ``key`` stands for one of KEYS."""
    text = body(name)
    for function in re.findall(r"local function (\w+)\(key\b", text):
        given = re.findall(rf"(?<!function ){function}\(([^,)]+)", text)
        assert given
        assert all(re.fullmatch(r"KEYS\[\d+\]", key) for key in given)


@pytest.mark.parametrize("name", NAMES)
def test_batches_of_ids_are_bounded(name: str) -> None:
    """A script that takes many ids says how many, as Python sends them."""
    if "letter ids" in header(name)["ARGV"]:
        assert f"at most {MOST_IDS}" in header(name)["ARGV"]
