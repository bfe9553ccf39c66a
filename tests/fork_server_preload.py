"""What a worker imports, loaded once for all that are forked; each start takes a quarter of it."""

import encodings.idna  # noqa: F401
import gc
from contextlib import suppress

import billiard.heap
import billiard.popen_fork
import billiard.synchronize  # noqa: F401
import celery.__main__
import celery.app.control
import celery.app.events
import celery.app.log
import celery.apps.worker
import celery.backends.redis
import celery.bin.celery
import celery.concurrency.thread
import celery.events.receiver
import celery.fixups.django
import celery.worker.autoscale
import celery.worker.consumer
import celery.worker.strategy
import kombu.matcher
import kombu.pidbox
import kombu.transport.pyamqp

import celery_dlq.cli.context
import celery_dlq.operations
import celery_dlq.plugin
import celery_dlq.transport.redis.fetch
import celery_dlq.worker.bootsteps  # noqa: F401
from celery_dlq.registry import features

with suppress(ImportError):  # Celery 5.5 brought it
    import celery.worker.consumer.delayed_delivery  # noqa: F401
with suppress(ImportError):  # pycurl is not installed everywhere
    import kombu.transport.SQS  # noqa: F401

for _feature in features():
    if _feature.observer:
        _feature.load(_feature.observer)

# Else each worker's first collection would visit all of that, and copy its pages.
gc.collect()
gc.freeze()
