"""Demands of operators that messages be dead-lettered, and what waits for its time."""
