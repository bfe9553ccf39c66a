"""Where teams already look: Sentry and Prometheus. Nothing here is imported unless it is used."""
