"""All settings of celery_dlq: Celery settings with the prefix ``dlq_``.

Set them like any Celery setting: ``app.conf.dlq_queues = …``, a config module, or Django
(``CELERY_DLQ_QUEUES`` by namespace). What the environment variable ``CELERY_DLQ_SETTINGS`` has goes
before that: a JSON object such as ``{"dlq_queues": {"orders": {"max_deliveries": 5}}}``. All are
checked at start-up, not at the first message.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from celery_dlq import registry
from celery_dlq.errors import DLQError, SettingsError
from celery_dlq.policies.checks import (
    check_names,
    duration,
    expected,
    key_name,
    name_text,
    positive_seconds,
    seconds,
    share,
    shown,
    suggestion,
    true_or_false,
)
from celery_dlq.policies.policy import DefaultDelay, Policy
from celery_dlq.policies.table import PolicyTable
from celery_dlq.store.address import OPTIONS as TRANSPORT_OPTIONS
from celery_dlq.store.address import SCHEMES, Address, address_of

if TYPE_CHECKING:
    from celery_dlq.letters.redaction import Redaction

PREFIX = "dlq_"
ENVIRONMENT = "CELERY_DLQ_SETTINGS"
"""Environment variable of settings for an app whose configuration is somebody else's."""
RABBITMQ = frozenset({"amqp", "amqps", "pyamqp", "librabbitmq"})
"""Its transports, as kombu names them."""
# Seconds, where broker_transport_options do not say otherwise.
# Source: https://github.com/celery/kombu/tree/main/kombu/transport, redis.py and SQS.py
_VISIBILITY_TIMEOUTS = {"redis": 3600.0, "rediss": 3600.0, "sentinel": 3600.0, "sqs": 1800.0}
_LEASED = ("redis", "rediss", "sentinel")
_RENEWED = (*_LEASED, "sqs")
_LEASE_SECONDS = 60.0
_TIMEOUT = "socket_timeout"
_TIMEOUT_SECONDS = 2.0
_COUNT_SECONDS = 72 * 3600.0
_SHORTEST_LEASE_SECONDS = 5.0


def _setting(
    default: Any,
    check: Callable[[str, Any], Any],
    doc: str,
) -> Any:
    metadata = {"check": check, "doc": doc}
    if callable(default):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


def _checked_queues(where: str, value: object) -> Mapping[str, Policy]:
    if not isinstance(value, Mapping):
        raise expected(where, "a mapping of queue name to policy", value)
    return {
        name_text(f"a queue name in {where}", queue): _checked_policy(f"{where}[{queue!r}]", policy)
        for queue, policy in value.items()
    }


def _checked_policy(where: str, value: object) -> Policy:
    if isinstance(value, Policy):  # public, so it may hold anything
        value = dict(value.items())
    return Policy.parse(value, where)  # type: ignore[arg-type]


def _release(where: str, value: object) -> str | None:
    return name_text(where, value) if value != "" else None  # of a variable that is not set


_lease = duration(
    # A worker that stands still for longer loses its messages to others.
    f"at least {_SHORTEST_LEASE_SECONDS:g} seconds",
    lambda given: given >= _SHORTEST_LEASE_SECONDS,
)


def _checked_urls(where: str, value: object) -> tuple[str, ...]:
    urls = value.split(";") if isinstance(value, str) else value
    known = isinstance(urls, (list, tuple)) and urls and all(map(_is_redis, urls))
    if not known:
        raise expected(where, "a Redis URL such as redis://localhost:6379/0", value)
    return tuple(urls)  # type: ignore[arg-type]


def _checked_tls(where: str, value: object) -> Mapping[str, Any] | bool:
    if not isinstance(value, (bool, Mapping)):
        what = "True, False or a mapping of redis-py's arguments such as ssl_ca_certs"
        raise expected(where, what, value)
    return value


def _transport_options(where: str, value: object) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise expected(where, "a mapping", value)
    check_names(f"options in {where}", value, (*TRANSPORT_OPTIONS, _TIMEOUT), SettingsError)
    if value.get(_TIMEOUT) is not None:
        positive_seconds(f"{where}[{_TIMEOUT!r}]", value[_TIMEOUT])
    return value


def _checked_redact(where: str, value: object) -> tuple[str, ...]:
    if not isinstance(value, (list, tuple)) or not all(isinstance(one, str) for one in value):
        raise expected(where, "a list of texts such as 'kwargs.card.number'", value)
    if value:
        _parsed_redaction(value, where)
    return tuple(value)


def _parsed_redaction(rules: Sequence[str], where: str = "") -> Redaction:
    from celery_dlq.letters.redaction import Redaction  # noqa: PLC0415 - most apps mask nothing

    try:
        return Redaction.parse(rules, where)
    except DLQError as exc:
        raise SettingsError(str(exc)) from exc


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The checked settings of one app; see each field's ``doc``."""

    url: tuple[str, ...] | None = _setting(
        None,
        _checked_urls,
        "Redis that keeps counters and letters: redis://, rediss:// (TLS), unix://, valkey://, "
        "sentinel:// or redis+cluster://. Unit: URL, or several as a list or separated by "
        "semicolons. Special value: none. Defaults to the broker's when that is a Redis.",
    )
    use_ssl: Mapping[str, Any] | bool | None = _setting(
        None,
        _checked_tls,
        "TLS to dlq_url: True verifies the server's certificate, a mapping has redis-py's "
        "arguments such as ssl_ca_certs. Defaults to the broker's broker_use_ssl if dlq_url is the "
        "broker's or not set.",
    )
    transport_options: Mapping[str, Any] | None = _setting(
        None,
        _transport_options,
        "How to reach dlq_url, with the names of broker_transport_options: master_name, "
        "sentinel_kwargs, min_other_sentinels, credential_provider, socket_keepalive, "
        "socket_keepalive_options, health_check_interval; and socket_timeout, the longest wait for "
        "one answer and for a connection (2 seconds; the broker's does not count). Defaults to the "
        "broker's if dlq_url is the broker's or not set.",
    )
    key_prefix: str = _setting(
        "dlq",
        key_name("key prefix"),
        "First part of every Redis key, to keep several apps in one Redis apart. "
        "Unit: text without braces. Defaults to dlq.",
    )
    queues: Mapping[str, Policy] = _setting(
        dict,
        _checked_queues,
        "Policies by queue name or glob pattern; the keys are those of dead_letter_policy. "
        "Special value: an empty mapping guards no queue. Defaults to {}.",
    )
    start_timeout: float = _setting(
        0.0,
        seconds,
        "How long a starting worker waits for a store that is away (no connection, read-only, "
        "full) before it ends with exit code 1. A wrong password, permission, version or cluster "
        "node ends it at once. Unit: seconds or timedelta. "
        "Special value: 0 starts without the store, as in an outage. Defaults to 0.",
    )
    reliable_fetch: bool = _setting(
        True,  # noqa: FBT003 - a default
        true_or_false,
        "Whether workers with a policy fetch from a Redis broker without a gap: a message is "
        "recorded as unacknowledged in the step that takes it, and belongs to its worker while "
        "that lives. With Amazon SQS as broker: whether they renew the visibility of their "
        "messages. False takes kombu's own fetch. Defaults to True.",
    )
    lease: float | None = _setting(
        None,
        _lease,
        "With reliable fetch: how long an unacknowledged message stays with a worker that gives "
        "no sign of life. Unit: seconds or timedelta, at least 5, at most the broker's "
        "visibility_timeout. Defaults to 60 seconds, or the visibility_timeout if that is shorter.",
    )
    spool_dir: str | None = _setting(
        None,
        name_text,
        "Folder where letters wait: of early-acknowledged messages while the store is down, of "
        "all messages once it has been down for a minute, or while it has no room (see "
        "dlq_memory_limit). Without this setting, messages that are not acknowledged yet stay "
        "with the broker instead. Unit: path. "
        "Defaults to a private folder among the system's temporary files.",
    )
    memory_limit: float = _setting(
        0.8,
        share,
        "Share of the maxmemory of Redis above which letters are stored without traceback and "
        "history; halfway from there to maxmemory they wait on disk (see dlq_spool_dir), so that "
        "the broker can always publish. Without a maxmemory it does nothing. "
        "Unit: 0 to 1. Special value: 0 is no limit. Defaults to 0.8.",
    )
    release: str | None = _setting(
        lambda: os.environ.get("SENTRY_RELEASE") or None,
        _release,
        "Version of your code, kept on each letter. Unit: text. Special value: an empty text is "
        "no version. Defaults to the environment variable SENTRY_RELEASE, if set.",
    )
    redact: tuple[str, ...] = _setting(
        (),
        _checked_redact,
        "What nobody may see: paths of arguments and names of headers (``kwargs.card.number``, "
        "``args[0].token``, ``kwargs.*.password``, ``**.password``, ``headers.authorization``), "
        "whole texts of a letter (description, exception_message, traceback), and patterns (re: "
        "and a regular expression). Shown as [redacted] by the commands, in the descriptive fields "
        "of letters, in logs and in Sentry; the message itself stays whole. "
        "Unit: list of texts. Special value: an empty list masks nothing. "
        "Defaults to [].",
    )

    features: Mapping[str, Any] = field(default_factory=dict)
    """The settings of features that are set, without their prefix; `of` has them all."""

    def of(self, name: str) -> Any:
        """A setting of a feature; ``None`` if the feature is not plugged in."""
        _feature, setting = registry.settings().get(name, (None, None))
        return self.features.get(name, setting.default if setting else None)

    @cached_property
    def redaction(self) -> Redaction:
        """Masks what ``dlq_redact`` names."""
        return _parsed_redaction(self.redact)

    @cached_property
    def policies(self) -> PolicyTable:
        """The table of the queue policies."""
        return PolicyTable(self.queues)

    @classmethod
    def from_conf(cls, conf: Any) -> Settings:
        """Read and check the ``dlq_*`` settings of an app, and of the environment."""
        checks = {f.name: f.metadata["check"] for f in dataclasses.fields(cls) if f.metadata}
        known = [PREFIX + name for name in (*checks, *registry.settings())]
        _refuse_unknown(conf, known)
        given, values, features = _from_environment(known), {}, {}
        for name, check in checks.items():
            if (found := _given_value(PREFIX + name, conf, given)) is not None:
                values[name] = check(*found)
        for name, (feature, setting) in registry.settings().items():
            if (found := _given_value(PREFIX + name, conf, given)) is not None:
                features[name] = feature.load(setting.check)(*found)
        settings = cls(**values, features=features)
        settings.policies.check()
        for feature in registry.features():
            if feature.check_settings and not features.keys().isdisjoint(feature.settings):
                feature.load(feature.check_settings)(settings)
        return settings

    def check_visibility(
        self, table: PolicyTable, transport: str, options: Mapping[str, Any]
    ) -> None:
        """Refuse what does not fit the broker's visibility timeout: a lease, default delays.

        A delayed message waits unacknowledged in a worker. Unless that renews, the broker takes the
        worker for dead after the visibility timeout and gives the message to another one, again
        and again.

        Source: https://docs.celeryq.dev/en/stable/getting-started/backends-and-brokers/redis.html
        """
        timeout = visibility_timeout(transport, options)
        if timeout is None:
            return
        if self.reliable_fetch and transport in _RENEWED:
            if transport in _LEASED and self.lease is not None and self.lease > timeout:
                raise SettingsError(
                    f"expected dlq_lease to be at most the broker's visibility timeout "
                    f"({timeout:g} s), got {self.lease:g} s: workers without celery_dlq would take "
                    f"messages from a live worker. Raise visibility_timeout in "
                    f"broker_transport_options, or shorten the lease"
                )
            return
        lease = ", or set dlq_reliable_fetch to True" if transport in _RENEWED else ""
        for place, policy in table.named_policies():
            delay = DefaultDelay.of(policy.default_delay).seconds
            if delay >= timeout:
                raise SettingsError(
                    f"expected {place}['default_delay'] to be shorter than the broker's "
                    f"visibility timeout ({timeout:g} s), got {delay:g} s: the message would be "
                    f"delivered again and again while it waits. Raise visibility_timeout in "
                    f"broker_transport_options well above the delay, or shorten the delay{lease}"
                )

    @property
    def store_timeout(self) -> float:
        """The longest wait in seconds for one answer of the store."""
        timeout = (self.transport_options or {}).get(_TIMEOUT)
        return _TIMEOUT_SECONDS if timeout is None else positive_seconds(_TIMEOUT, timeout)

    @staticmethod
    def count_seconds(visibility_timeout_seconds: float | None) -> float:
        """How long counts and history of a message are kept after its last delivery.

        A worker that dies is found at the latest after the visibility timeout: its messages must
        not begin to count anew.
        """
        return max(_COUNT_SECONDS, 3 * (visibility_timeout_seconds or 0))

    def lease_for(self, timeout_seconds: float | None) -> float:
        """The lease in seconds, with a broker's visibility timeout in seconds."""
        lease = self.lease or _LEASE_SECONDS
        return lease if timeout_seconds is None else min(lease, timeout_seconds)

    def store_at(self, conf: Any) -> tuple[Address, str]:
        """The Redis that keeps counters and letters, and the prefix of its keys.

        The broker's, read as kombu reads it and with its ``global_keyprefix``, if ``dlq_url`` is
        not set or names the broker.
        """
        broker = tuple(filter(_is_redis, _listed_urls(conf.broker_write_url)))
        if self.url is not None and self.url != broker:
            address = address_of(
                self.url, use_ssl=self.use_ssl, options=self.transport_options or {}
            )
            return address, self.key_prefix
        if not broker:
            raise SettingsError(
                f"expected dlq_url to be set, because the broker ({shown(conf.broker_write_url)}) "
                f"is not a Redis that could keep dead letters; set dlq_url to a Redis URL such as "
                f"redis://localhost:6379/0"
            )
        options = {**(conf.broker_transport_options or {}), **(self.transport_options or {})}
        # kombu takes a mapping only: with True it connects without TLS.
        theirs = conf.broker_use_ssl if isinstance(conf.broker_use_ssl, Mapping) else None
        tls = theirs if self.use_ssl is None else self.use_ssl
        address = address_of(
            broker,
            "the broker",
            use_ssl=tls,
            options=options,
            options_where="broker_transport_options",
            of_broker=True,
        )
        return address, f"{options.get('global_keyprefix') or ''}{self.key_prefix}"


def check_broker_url(urls: object) -> None:
    """Refuse a Redis Cluster as the broker: kombu would read the URL as another one."""
    for url in _listed_urls(urls):
        if url.partition("://")[0].endswith("+cluster"):
            raise SettingsError(
                f"expected a broker that Celery has a transport for, got {shown(url)}: it has "
                f"none for Redis Cluster. Take one Redis, Sentinel, RabbitMQ or Amazon SQS as "
                f"broker_url; counters and letters may be in the cluster: set dlq_url to it"
            )


def _listed_urls(urls: object) -> tuple[str, ...]:
    listed = urls.split(";") if isinstance(urls, str) else urls
    return tuple(map(str, listed)) if isinstance(listed, (list, tuple)) else ()


def _is_redis(url: object) -> bool:
    return isinstance(url, str) and "://" in url and url.partition("://")[0] in SCHEMES


def visibility_timeout(transport: str, options: Mapping[str, Any] | None) -> float | None:
    """The visibility timeout of a transport in seconds; ``None`` if it has none."""
    default = _VISIBILITY_TIMEOUTS.get(transport)
    given = (options or {}).get("visibility_timeout", default)
    if default is None or given is None:
        return None
    return positive_seconds("broker_transport_options['visibility_timeout']", given)


def _given_value(name: str, conf: Any, environment: Mapping[str, Any]) -> tuple[str, Any] | None:
    """What to call a setting in an error, and its value; ``None`` if it is not set."""
    where, value = name, conf.get(name)
    if name in environment:
        where, value = f"{ENVIRONMENT}[{name!r}]", environment[name]
    return None if value is None else (where, value)


def _from_environment(known: Collection[str]) -> Mapping[str, Any]:
    given = os.environ.get(ENVIRONMENT, "").strip()
    try:
        found = json.loads(given) if given else {}
    except ValueError as exc:  # names the place and not the text, which may have a password in it
        raise SettingsError(f"expected {ENVIRONMENT} to be JSON, got a mistake: {exc}") from None
    if not isinstance(found, dict):
        raise SettingsError(
            f'expected {ENVIRONMENT} to be a JSON object such as {{"dlq_queues": {{}}}}, '
            f"got one of type {type(found).__name__}"
        )
    check_names(f"dlq_ settings in {ENVIRONMENT}", found, known, SettingsError)
    return found


def _refuse_spelling(name: str, meant: str, namespace: str, keys: Collection[str]) -> None:
    """Refuse a name that Celery would not read, so that nothing would be guarded.

    With a namespace a ``DLQ_…`` may be somebody else's; ``DLQ_QUEUES`` is, if ours is there too.
    """
    if not namespace:
        raise SettingsError(
            f"expected only known dlq_ settings, got {name!r}; write {meant} "
            f'(upper case and CELERY_ need config_from_object(…, namespace="CELERY"))'
        )
    right = f"{namespace}{meant}".upper()
    if meant == f"{PREFIX}queues" and right not in map(str.upper, map(str, keys)):
        raise SettingsError(
            f"expected only settings with the namespace, got {name!r}; write {right}"
        )


def _refuse_unknown(conf: Any, known: Collection[str]) -> None:
    # With a namespace (Django) only CELERY_DLQ_… is ours; a DLQ_… there is somebody else's.
    keys = list(conf.keys())  # this is also what makes a lazy configuration known
    namespace = str(getattr(conf, "prefix", None) or "").lower()
    for key in keys:
        name = str(key)
        if namespace and name.lower().startswith(namespace):
            name = name[len(namespace) :].lower()
        elif (meant := name.lower().removeprefix("celery_")) != name and meant in known:
            _refuse_spelling(name, meant, namespace, keys)
        if name.startswith(PREFIX) and name not in known:
            raise SettingsError(
                f"expected only known dlq_ settings, got {key!r}; {suggestion(name, known)}"
            )
