"""Amqp."""
