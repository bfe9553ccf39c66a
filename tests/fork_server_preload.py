"""What a worker imports, loaded once for all that are forked."""

import celery_dlq.operations
import celery_dlq.plugin
import celery_dlq.worker.bootsteps  # noqa: F401
