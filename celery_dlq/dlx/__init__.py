"""Publishes letters to dead-letter exchanges, for other services."""
