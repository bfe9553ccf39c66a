"""Fetches messages from Redis brokers so that none is lost, and leases them to their worker."""
