"""Integrations with Sentry and Prometheus; loaded only if used."""
