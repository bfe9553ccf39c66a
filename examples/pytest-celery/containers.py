"""Nodes of pytest-celery that are Docker containers: its own Redis, and a worker of our image."""

from pathlib import Path

import pytest
from pytest_celery import (
    CeleryBackendCluster,
    CeleryBrokerCluster,
    CeleryWorkerContainer,
)
from pytest_docker_tools import build, container, fxtr

REPOSITORY = str(Path(__file__).resolve().parents[2])  # there is no release yet


class ShopContainer(CeleryWorkerContainer):
    @classmethod
    def command(cls, *args, **_):
        return ["celery", "-A", "shop", "worker", "--loglevel", "INFO", "--queues", "orders", *args]


shop_image = build(path=REPOSITORY, dockerfile="examples/pytest-celery/Dockerfile", tag="shop-test")

default_worker_container = container(
    image="{shop_image.id}",
    environment=fxtr("default_worker_env"),
    network="{default_pytest_celery_network.name}",
    wrapper_class=ShopContainer,
    timeout=60,
    command=fxtr("default_worker_command"),
)


@pytest.fixture
def default_worker_container_cls():
    return ShopContainer


@pytest.fixture
def celery_broker_cluster(celery_redis_broker):
    return CeleryBrokerCluster(celery_redis_broker)


@pytest.fixture
def celery_backend_cluster(celery_redis_backend):
    return CeleryBackendCluster(celery_redis_backend)
