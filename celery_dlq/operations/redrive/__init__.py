"""Redrive."""
