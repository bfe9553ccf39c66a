"""What an error of Redis means: what was expected of the store, and what to do.

What heals by itself or by an operator (no connection, a replica, a full disk) is
`StoreUnavailable`. What stays until a setting, a permission or the server is changed is
`SettingsError` when a worker starts. An error that is not known is taken for the first kind, which
stops no worker.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from celery_dlq.errors import SettingsError, StoreUnavailable
from celery_dlq.letters.printable import error_without_secrets, url_without_secrets

CLUSTER = "begin its URL with redis+cluster:// (with TLS: rediss+cluster://)"


class Fault(NamedTuple):
    """What an error of Redis means."""

    # Matches the class and the text of such an error; redis-py has cut the error's code off the
    # text if it has a class for it, and each version has others
    signs: str
    expected: str  # What was expected of the store
    remedy: str  # What to do
    error: type[SettingsError | StoreUnavailable] = SettingsError  # What is raised


_FAULTS = (
    Fault(
        r"\bREADONLY\b|ReadOnlyError|read only replica",
        "to be a master",
        "after a failover it will be one; else name the master in its URL",
        StoreUnavailable,
    ),
    Fault(
        r"\bOOM\b|OutOfMemoryError|used memory > 'maxmemory'",
        "to have memory left",
        "export and trim letters, or raise its maxmemory",
        StoreUnavailable,
    ),
    Fault(
        r"\b(MISCONF|NOREPLICAS)\b",
        "to accept writes",
        "free its disk, or bring its replicas back",
        StoreUnavailable,
    ),
    Fault(
        r"AuthenticationError|\b(WRONGPASS|NOAUTH)\b|invalid username-password|invalid password"
        r"|Authentication required|(?i:arguments for 'auth')",
        "to accept the user and password of its URL",
        "correct them there, in dlq_url or broker_url",
    ),
    Fault(
        r"\bNOPERM\b|NoPermissionError|ACL failure|no permissions|can't (run this|access at least)"
        r"|EXEC without MULTI",
        "to allow its user what celery_dlq needs",
        "allow it with ACL SETUSER, on the keys ~{prefix}:*",
    ),
    Fault(
        r"\b(MOVED|ASK|CROSSSLOT)\b|MovedError|AskError|CrossSlot|in cluster mode",
        "to be one server, not a node of a Redis Cluster",
        CLUSTER,
    ),
    Fault(
        r"cluster support disabled|[Cc]luster mode is not enabled",
        "to be a Redis Cluster",
        "begin its URL with redis:// (with TLS: rediss://)",
    ),
    Fault(
        r"DB index|invalid DB",
        "to have the database that its URL names",
        "take another number, or raise the server's setting 'databases'",
    ),
    Fault(
        r"(?i)(unknown|unsupported) (redis )?command",
        "to know the commands of Redis 6.2",
        "rename none, and connect to it without a proxy that leaves some out",
    ),
    Fault(r"InvalidResponse", "to be a Redis", "correct the host and port of its URL"),
    Fault(
        r"\bDENIED\b",
        "to accept connections from here",
        "give it a password, or set its protected-mode to no",
    ),
    Fault(
        r"CERTIFICATE_VERIFY_FAILED|WRONG_VERSION_NUMBER",
        "to speak TLS with a certificate that is trusted here",
        "begin its URL with redis:// if it has no TLS, or set its CA and host name",
    ),
)


def fault_line(url: str, expected: str, got: str, remedy: str) -> str:
    """What was expected of the store at a URL, what it is, and what to do."""
    return f"expected the store at {url_without_secrets(url)} {expected}, got {got}; {remedy}"


def known_fault(
    exc: Exception, url: str, prefix: str = "<dlq_key_prefix>"
) -> SettingsError | StoreUnavailable | None:
    """The error to raise for one of redis-py's; ``None`` if its meaning is not known."""
    got = error_without_secrets(exc).removesuffix(".")
    for known in _FAULTS:
        if re.search(known.signs, got):
            return known.error(
                fault_line(url, known.expected, got, known.remedy.format(prefix=prefix))
            )
    return None
