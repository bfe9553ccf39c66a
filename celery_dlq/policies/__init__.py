"""Policies: the limits and delays of queues and tasks, and what they decide."""
