"""Reliable fetch and leases for kombu's Redis transports."""
