"""Counters and letters in Redis: streams, hashes, and one script per atomic step.

Works on Redis 6.2 and later and on Valkey. All keys of one dead-letter queue
share a hash tag, so that each script runs on one slot.
"""
