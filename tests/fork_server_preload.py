"""The imports of a worker, loaded once for all that are forked."""

import celery_dlq.operations
import celery_dlq.plugin
import celery_dlq.worker.bootsteps  # noqa: F401
