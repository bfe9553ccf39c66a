"""Adopts messages that the broker itself dead-lettered, as letters."""
