"""The app whose letters `benchmarks.web` looks at."""

import os

from celery import Celery

app = Celery("benchmark", broker=os.environ["BENCHMARK_URL"])
app.conf.dlq_queues = {"orders": {"max_deliveries": 3}}
