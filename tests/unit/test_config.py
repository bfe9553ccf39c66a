"""Settings: read from Celery, checked at start-up, refused in one line."""

from __future__ import annotations

import dataclasses
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from builders import an_app

from celery_dlq import registry
from celery_dlq.config import ENVIRONMENT, PREFIX, Settings, check_broker_url
from celery_dlq.errors import SettingsError
from celery_dlq.policies.policy import Policy

SECRET = "s3cret"


@pytest.fixture(autouse=True)
def _no_release(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SENTRY_RELEASE", raising=False)


def conf(broker: object, **others: object) -> Any:
    """What is asked of an app's settings to find the broker."""
    defaults = {"broker_use_ssl": None, "broker_transport_options": {}}
    return SimpleNamespace(broker_write_url=broker, **{**defaults, **others})


def refusal(conf: Any) -> str:
    """The one-line text with which settings are refused."""
    with pytest.raises(SettingsError) as raised:
        Settings.from_conf(conf)
    text = str(raised.value)
    assert "\n" not in text
    return text


def test_a_transport_option_that_is_not_used_is_refused() -> None:
    """A typing mistake would be a connection without what it was to have."""
    text = refusal({"dlq_transport_options": {"masters_name": "m"}})
    assert "did you mean 'master_name'?" in text


def test_an_app_without_settings_has_the_documented_defaults() -> None:
    """Installing the plugin alone changes nothing."""
    assert Settings.from_conf(an_app().conf) == Settings(
        url=None,
        key_prefix="dlq",
        queues={},
        start_timeout=0.0,
        spool_dir=None,
        release=None,
        reliable_fetch=True,
        lease=None,
    )


def test_all_settings_are_read_from_a_celery_app() -> None:
    """Every setting reaches its field, durations in seconds."""
    conf = an_app(
        dlq_url="rediss://:pw@redis.example:6380/2",
        dlq_use_ssl={"ssl_ca_certs": "/etc/redis.pem"},
        dlq_transport_options={"socket_keepalive": True, "socket_timeout": 0.5},
        dlq_key_prefix="shop",
        dlq_queues={"orders": {"max_deliveries": 5}, "*": Policy(max_deliveries=20)},
        dlq_start_timeout=timedelta(minutes=5),
        dlq_spool_dir="/var/spool/dlq",
        dlq_memory_limit=1,
        dlq_release="1.2.3",
        dlq_adopt={"orders.dead": "orders-DLQ", "other.dead": None},
        dlq_sample_successes=0.001,
        dlq_redact=["kwargs.card", r"re:\b\d{16}\b"],
        dlq_sentry=False,
        dlq_reliable_fetch=False,
        dlq_lease=timedelta(seconds=30),
    ).conf
    settings = Settings.from_conf(conf)
    assert settings == Settings(
        url=("rediss://:pw@redis.example:6380/2",),
        use_ssl={"ssl_ca_certs": "/etc/redis.pem"},
        transport_options={"socket_keepalive": True, "socket_timeout": 0.5},
        key_prefix="shop",
        queues={"orders": Policy(max_deliveries=5), "*": Policy(max_deliveries=20)},
        start_timeout=300.0,
        spool_dir="/var/spool/dlq",
        memory_limit=1.0,
        release="1.2.3",
        redact=("kwargs.card", r"re:\b\d{16}\b"),
        features={
            "adopt": {"orders.dead": "orders-DLQ", "other.dead": None},
            "sentry": False,
            "sample_successes": 0.001,
        },
        reliable_fetch=False,
        lease=30.0,
    )
    assert {f"{PREFIX}{f.name}" for f in dataclasses.fields(Settings) if f.metadata} <= set(conf)
    assert {f"{PREFIX}{name}" for name in registry.settings()} <= set(conf)


def test_every_setting_says_what_it_means() -> None:
    """The text of a setting follows it, with unit and default."""
    core = [field.metadata["doc"] for field in dataclasses.fields(Settings) if field.metadata]
    features = [setting.doc for _feature, setting in registry.settings().values()]
    assert all("Defaults to" in doc for doc in (*core, *features))


def test_the_queue_policies_can_be_asked() -> None:
    """Settings make the table that resolves a queue's policy."""
    settings = Settings.from_conf({"dlq_queues": {"orders": {"max_deliveries": 5}}})
    assert settings.policies.resolve("orders") == Policy(max_deliveries=5)


def test_the_release_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A release that is named for Sentry need not be named twice."""
    monkeypatch.setenv("SENTRY_RELEASE", "shop@7")
    assert Settings.from_conf({}).release == "shop@7"
    assert Settings.from_conf({"dlq_release": "shop@8"}).release == "shop@8"


def test_a_release_of_a_variable_that_is_not_set_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """``os.environ.get("RELEASE", "")`` stops no command, on no host."""
    monkeypatch.setenv("SENTRY_RELEASE", "")
    assert Settings.from_conf({}).release is None
    assert Settings.from_conf({"dlq_release": ""}).release is None


def test_the_environment_goes_before_the_app(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever does not own an app's configuration can still set policies; the rest stays."""
    monkeypatch.setenv(ENVIRONMENT, '{"dlq_queues": {"orders": {"default_delay": 2}}}')
    conf = {"dlq_queues": {"mails": {"max_deliveries": 5}}, "dlq_key_prefix": "shop"}
    settings = Settings.from_conf(conf)
    assert settings.queues == {"orders": Policy(default_delay=2.0)}
    assert settings.key_prefix == "shop"


def test_an_empty_environment_variable_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compose files pass variables on that are not set."""
    monkeypatch.setenv(ENVIRONMENT, " ")
    assert Settings.from_conf({"dlq_key_prefix": "shop"}).key_prefix == "shop"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("{'dlq_url': 'redis://:s3cret@r/0'}", "to be JSON, got a mistake: Expecting property"),
        ('["dlq_queues"]', "a JSON object such as"),
        ('{"dlq_queue": {}}', "got 'dlq_queue'; did you mean 'dlq_queues'?"),
        ('{"broker_url": "redis://:s3cret@r/0"}', "got 'broker_url'"),
        (
            '{"dlq_queues": {"orders": {"max_deliveries": 0}}}',
            "CELERY_DLQ_SETTINGS['dlq_queues']['orders']['max_deliveries'] to be a whole number",
        ),
    ],
)
def test_a_mistake_in_the_environment_is_refused(
    monkeypatch: pytest.MonkeyPatch, given: str, said: str
) -> None:
    """The message names the variable, and shows no password."""
    monkeypatch.setenv(ENVIRONMENT, given)
    text = refusal({})
    assert ENVIRONMENT in text
    assert said in text
    assert SECRET not in text


def test_none_means_the_default() -> None:
    """A setting that is ``None`` is as good as left out."""
    assert Settings.from_conf({"dlq_start_timeout": None}).start_timeout == 0.0


def test_django_settings_are_read_by_namespace() -> None:
    """``CELERY_DLQ_QUEUES`` in Django's settings is ``dlq_queues`` here."""
    app = an_app()
    django = SimpleNamespace(
        CELERY_DLQ_QUEUES={"orders": {"max_deliveries": 5}},
        CELERY_DLQ_KEY_PREFIX="shop",
        CELERY_TASK_ACKS_LATE=True,
    )
    app.config_from_object(django, namespace="CELERY")
    settings = Settings.from_conf(app.conf)
    assert settings.queues == {"orders": Policy(max_deliveries=5)}
    assert settings.key_prefix == "shop"


def test_a_misspelt_django_setting_is_refused_with_a_hint() -> None:
    """The message names the setting as the person wrote it."""
    app = an_app()
    app.config_from_object(SimpleNamespace(CELERY_DLQ_QUEUE={}), namespace="CELERY")
    text = refusal(app.conf)
    assert "CELERY_DLQ_QUEUE" in text
    assert "did you mean 'dlq_queues'?" in text


@pytest.mark.parametrize("name", ["DLQ_QUEUES", "CELERY_DLQ_QUEUES", "celery_dlq_queues"])
def test_a_name_that_celery_would_not_read_is_refused(name: str) -> None:
    """Nothing would be guarded, and nobody would say so."""
    app = an_app()
    setattr(app.conf, name, {"orders": {"max_deliveries": 3}})
    text = refusal(app.conf)
    assert name in text
    assert "write dlq_queues (" in text


def test_a_name_without_the_namespace_is_refused() -> None:
    """Unless both are there: then ``DLQ_QUEUES`` is somebody else's."""
    app, both = an_app(), {"DLQ_QUEUES": {}, "CELERY_DLQ_QUEUES": {}}
    app.config_from_object(SimpleNamespace(DLQ_QUEUES={}, CELERY_DLQ_LEASE=9), namespace="CELERY")
    assert "write CELERY_DLQ_QUEUES" in refusal(app.conf)
    app = an_app()
    app.config_from_object(SimpleNamespace(**both), namespace="CELERY")
    assert Settings.from_conf(app.conf).queues == {}


def test_settings_of_others_do_not_matter() -> None:
    """With a namespace, a ``DLQ_…`` setting in Django belongs to somebody else."""
    app = an_app()
    django = SimpleNamespace(DLQ_SOMETHING=1, DLQ_URL="x", DEBUG=True, CELERY_TASK_ACKS_LATE=True)
    app.config_from_object(django, namespace="CELERY")
    assert Settings.from_conf(app.conf) == Settings()


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("dlq_queue", "did you mean 'dlq_queues'?"),
        ("dlq_start_timout", "did you mean 'dlq_start_timeout'?"),
        ("dlq_zzz", "expected one of dlq_adopt, dlq_key_prefix"),
        ("dlq_", "did you mean 'dlq_"),
    ],
)
def test_an_unknown_setting_is_refused_with_a_hint(name: str, hint: str) -> None:
    """A misspelt setting would do nothing, so it stops the start."""
    text = refusal(an_app(**{name: {}}).conf)
    assert text.startswith(f"expected only known dlq_ settings, got {name!r}; ")
    assert hint in text


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("dlq_url", "amqp://localhost//", "a Redis URL such as redis://localhost:6379/0"),
        ("dlq_url", "localhost", "a Redis URL such as redis://localhost:6379/0"),
        ("dlq_url", "", "a Redis URL such as redis://localhost:6379/0"),
        ("dlq_url", 6379, "a Redis URL such as redis://localhost:6379/0"),
        ("dlq_url", [], "a Redis URL such as redis://localhost:6379/0"),
        ("dlq_url", "redis://a;amqp://b", "a Redis URL such as redis://localhost:6379/0"),
        (
            "dlq_use_ssl",
            "yes",
            "True, False or a mapping of redis-py's arguments such as ssl_ca_certs",
        ),
        ("dlq_transport_options", "m", "a mapping"),
        ("dlq_key_prefix", "", "a name (text that is not empty)"),
        ("dlq_key_prefix", "{dlq}", "a key prefix without braces"),
        ("dlq_key_prefix", 5, "a name (text that is not empty)"),
        ("dlq_queues", ["orders"], "a mapping of queue name to policy"),
        ("dlq_queues", "orders", "a mapping of queue name to policy"),
        ("dlq_sample_successes", 1.5, "a share from 0 to 1, e.g. 0.001"),
        ("dlq_sample_successes", -0.1, "a share from 0 to 1, e.g. 0.001"),
        ("dlq_sample_successes", float("nan"), "a share from 0 to 1, e.g. 0.001"),
        ("dlq_sample_successes", True, "a share from 0 to 1, e.g. 0.001"),
        ("dlq_sample_successes", "1%", "a share from 0 to 1, e.g. 0.001"),
        ("dlq_start_timeout", -1, "a duration of 0 or more seconds"),
        (
            "dlq_start_timeout",
            "long",
            "a number of seconds, a timedelta or a text such as 30s, 5m, 2h or 14d",
        ),
        (
            "dlq_start_timeout",
            True,
            "a number of seconds, a timedelta or a text such as 30s, 5m, 2h or 14d",
        ),
        ("dlq_spool_dir", 7, "a name (text that is not empty)"),
        ("dlq_memory_limit", 80, "a share from 0 to 1, e.g. 0.001"),
        ("dlq_memory_limit", True, "a share from 0 to 1, e.g. 0.001"),
        ("dlq_reliable_fetch", "yes", "True or False"),
        ("dlq_reliable_fetch", 1, "True or False"),
        ("dlq_lease", 4.9, "a duration of at least 5 seconds"),
        ("dlq_lease", timedelta(seconds=1), "a duration of at least 5 seconds"),
        (
            "dlq_lease",
            "long",
            "a number of seconds, a timedelta or a text such as 30s, 5m, 2h or 14d",
        ),
        (
            "dlq_lease",
            True,
            "a number of seconds, a timedelta or a text such as 30s, 5m, 2h or 14d",
        ),
        ("dlq_lease", 0, "a duration of at least 5 seconds"),
        ("dlq_lease", -1, "a duration of at least 5 seconds"),
        ("dlq_release", 7, "a name (text that is not empty)"),
    ],
)
def test_a_bad_value_says_what_was_expected_and_what_came(
    name: str, value: object, expected: str
) -> None:
    """One line names the setting, the expectation and the value."""
    text = refusal({name: value})
    assert text.startswith(f"expected {name} to be {expected}, got ")


@pytest.mark.parametrize(
    ("queues", "where"),
    [
        ({"orders": 5}, "dlq_queues['orders']"),
        ({"orders": {"max_deliveries": 0}}, "dlq_queues['orders']['max_deliveries']"),
        ({"orders": {"max_delivery": 5}}, "dlq_queues['orders']"),
        ({"": {}}, "a queue name in dlq_queues"),
        ({5: {}}, "a queue name in dlq_queues"),
        ({"orders": {"dead_letter_queue": "orders"}}, "dlq_queues['orders']['dead_letter_queue']"),
    ],
)
def test_a_bad_policy_is_named_by_its_place(queues: Any, where: str) -> None:
    """With many queues, the message says which."""
    assert where in refusal({"dlq_queues": queues})


@pytest.mark.parametrize(
    "policy",
    [
        Policy(max_deliveries=0),
        Policy(max_deliveries="5"),  # type: ignore[arg-type]
        Policy(default_delay=-1.0),
        Policy(dead_letter_queue="a{b"),
        Policy(reasons=frozenset({"boredom"})),  # type: ignore[arg-type]
    ],
)
def test_a_policy_object_is_checked_like_a_mapping(policy: Policy) -> None:
    """`Policy` is public: a bad one must not come out at the first message."""
    text = refusal({"dlq_queues": {"orders": policy}})
    assert text.startswith("expected ")
    assert "dlq_queues['orders'][" in text


def test_a_policy_object_takes_what_a_mapping_takes() -> None:
    """A timedelta is a duration there too."""
    settings = Settings.from_conf(
        {"dlq_queues": {"orders": Policy(default_delay=timedelta(seconds=30))}}  # type: ignore[arg-type]
    )
    assert settings.queues["orders"].default_delay == 30.0


def test_a_delay_that_rabbitmq_cannot_have_is_refused() -> None:
    """Its native delays end at 2 to the power of 28 seconds; equal is fine."""
    most = 2**28 - 1
    Settings.from_conf({"dlq_queues": {"orders": {"default_delay": most}}})
    text = refusal({"dlq_queues": {"orders": {"default_delay": {"seconds": most + 1}}}})
    assert "['default_delay']['seconds'] to be a duration of 0 to 268,435,455 seconds" in text


def test_a_timeout_of_the_store_is_a_transport_option() -> None:
    """Two seconds where it is not set."""
    assert Settings().store_timeout == 2.0
    assert Settings(transport_options={"socket_timeout": 0.5}).store_timeout == 0.5
    assert "more than 0 seconds" in refusal({"dlq_transport_options": {"socket_timeout": 0}})


def test_counts_outlast_the_visibility_timeout() -> None:
    """A message that comes back from a dead worker does not count anew."""
    assert Settings.count_seconds(None) == Settings.count_seconds(3600) == 72 * 3600
    assert Settings.count_seconds(7 * 86400) == 21 * 86400


@pytest.mark.parametrize(
    ("broker", "urls"),
    [
        ("redis://localhost:6379/0", ("redis://localhost:6379/0",)),
        ("rediss://:pw@host/1", ("rediss://:pw@host/1",)),
        ("redis+socket:///run/redis.sock", ("redis+socket:///run/redis.sock",)),
        ("redis://a/0;redis://b/0", ("redis://a/0", "redis://b/0")),
        (["amqp://a//", "redis://b/0"], ("redis://b/0",)),
    ],
)
def test_the_broker_is_the_store_when_it_is_a_redis(broker: object, urls: object) -> None:
    """The smallest set-up needs no ``dlq_url``; of a failover list each Redis is tried."""
    address, prefix = Settings().store_at(conf(broker))
    assert (address.urls, address.of_broker, prefix) == (urls, True, "dlq")


def test_how_the_broker_is_reached_goes_for_the_store() -> None:
    """TLS, Sentinel's name and the prefix of keys are said once."""
    options = {"master_name": "shop", "global_keyprefix": "shop:", "visibility_timeout": 60}
    tls = {"ssl_ca_certs": "/etc/redis.pem"}
    theirs = conf("sentinel://a;sentinel://b", broker_use_ssl=tls, broker_transport_options=options)
    address, prefix = Settings().store_at(theirs)
    assert (address.tls, address.options["master_name"], prefix) == (tls, "shop", "shop:dlq")
    the_same = Settings(url=("sentinel://a", "sentinel://b")).store_at(theirs)
    assert the_same == (address, prefix)


def test_what_is_the_brokers_does_not_go_for_another_store() -> None:
    """A password, a certificate or a prefix of one server is wrong at another."""
    theirs = conf(
        "redis://broker",
        broker_use_ssl={"ssl_ca_certs": "/etc/redis.pem"},
        broker_transport_options={"global_keyprefix": "shop:", "socket_keepalive": True},
    )
    address, prefix = Settings(url=("redis://letters",)).store_at(theirs)
    assert (address.tls, address.options, prefix) == (None, {}, "dlq")


def test_true_as_the_brokers_tls_is_no_tls_as_in_kombu() -> None:
    """Kombu's Redis transport takes a mapping only and ignores anything else."""
    address, _prefix = Settings().store_at(conf("redis://broker", broker_use_ssl=True))
    assert address.tls is None
    own = Settings(use_ssl=True).store_at(conf("redis://broker"))[0]
    assert own.connections()[0]["ssl_cert_reqs"] == "required"


def test_a_cluster_as_the_broker_is_refused_with_what_to_do() -> None:
    """Kombu reads such a URL as one of the server on this machine."""
    for urls in (f"redis+cluster://:{SECRET}@a", ["redis://a", "rediss+cluster://b"]):
        with pytest.raises(SettingsError, match=r"RabbitMQ or Amazon SQS.*set dlq_url") as raised:
            check_broker_url(urls)
        assert SECRET not in str(raised.value)
    check_broker_url("redis://a;redis://b")


def test_sentinels_need_the_name_of_the_server() -> None:
    """The message names the setting that is missing."""
    with pytest.raises(SettingsError, match=r"broker_transport_options\['master_name'\]"):
        Settings().store_at(conf("sentinel://a"))
    with pytest.raises(SettingsError, match=r"dlq_transport_options\['master_name'\]"):
        Settings(url=("sentinel://a",)).store_at(conf("amqp://b"))


def test_dlq_url_wins_over_the_broker() -> None:
    """Letters may be kept elsewhere than messages."""
    settings = Settings.from_conf({"dlq_url": "redis://letters/0"})
    for broker in ("redis://broker/0", "amqp://broker//"):
        address, _prefix = settings.store_at(conf(broker))
        assert address.urls == ("redis://letters/0",)


def test_the_url_of_a_broker_is_shown_with_its_scheme() -> None:
    """And without user and password."""
    with pytest.raises(SettingsError, match=r"the broker \('amqp://\*\*@host//'\)"):
        Settings().store_at(conf(f"amqp://guest:{SECRET}@host//"))


@pytest.mark.parametrize("broker", ["amqp://guest@host//", "", None, []])
def test_a_broker_that_is_no_redis_needs_dlq_url(broker: object) -> None:
    """The message says what to set."""
    with pytest.raises(SettingsError, match="expected dlq_url to be set") as raised:
        Settings().store_at(conf(broker))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "value",
    [
        f"amqp://guest:{SECRET}@host//",
        f"redis//:{SECRET}@host/0",
        f":{SECRET}@host:6379",
        [f"redis//:{SECRET}@host/0"],
        {"url": f"redis://:{SECRET}@host/0"},
        f"redis://:{SECRET}@host/0".encode(),
    ],
)
def test_a_refused_url_does_not_show_its_password(value: object) -> None:
    """Start-up errors end in logs; a typing mistake must not publish a password."""
    assert SECRET not in refusal({"dlq_url": value})


@pytest.mark.parametrize(
    "broker",
    [
        f"amqp://guest:{SECRET}@host//",
        f"amqp://guest:{SECRET}@a//;amqp://guest:{SECRET}@b//",
        [f"amqp://guest:{SECRET}@host//"],
        f"amqp://guest:{SECRET}@host:no-port//",
    ],
)
def test_a_refused_broker_does_not_show_its_password(broker: object) -> None:
    """All URLs of a failover list are covered, and odd ones too."""
    with pytest.raises(SettingsError) as raised:
        Settings().store_at(conf(broker))
    assert SECRET not in str(raised.value)


def visibility_refusal(transport: str, options: dict[str, Any], **conf: Any) -> str:
    """The one-line text with which settings are refused that do not fit a broker."""
    settings = Settings.from_conf(conf)
    with pytest.raises(SettingsError) as raised:
        settings.check_visibility(settings.policies, transport, options)
    text = str(raised.value)
    assert "\n" not in text
    return text


def test_a_lease_is_a_minute_or_the_shorter_visibility_timeout() -> None:
    """Workers without leases must not take from live ones."""
    assert Settings.from_conf({}).lease_for(3600.0) == 60.0
    assert Settings.from_conf({}).lease_for(20.0) == 20.0
    assert Settings.from_conf({"dlq_lease": 5}).lease_for(20.0) == 5.0


def test_a_lease_above_the_visibility_timeout_is_refused() -> None:
    """The text has both, and the ways out."""
    said = visibility_refusal("redis", {"visibility_timeout": 20}, dlq_lease=30)
    assert "expected dlq_lease to be at most the broker's visibility timeout (20 s), got 30" in said
    assert "Raise visibility_timeout" in said
    assert "shorten the lease" in said


@pytest.mark.parametrize("timeout", ["soon", 0, -1, True])
def test_a_visibility_timeout_that_is_no_duration_is_refused(timeout: Any) -> None:
    """The transport would give every message away, or fail at the first."""
    said = visibility_refusal("redis", {"visibility_timeout": timeout})
    assert "visibility_timeout" in said
    assert repr(timeout) in said or f"got {timeout}" in said


def test_a_long_delay_is_refused_only_without_leases() -> None:
    """With them, a message that waits for its time is renewed."""
    delays: dict[str, Any] = {"dlq_queues": {"orders": {"default_delay": 30}}}
    options = {"visibility_timeout": 20}
    with_leases = Settings.from_conf(delays)
    with_leases.check_visibility(with_leases.policies, "redis", options)
    with_leases.check_visibility(with_leases.policies, "rediss", options)

    said = visibility_refusal("redis", options, dlq_reliable_fetch=False, **delays)
    assert "set dlq_reliable_fetch to True" in said
    with_leases.check_visibility(with_leases.policies, "sqs", options)
    said = visibility_refusal("sqs", options, dlq_reliable_fetch=False, **delays)
    assert "set dlq_reliable_fetch to True" in said
