"""Sends letters back to their queues: chooses, checks, claims, publishes and removes them."""
