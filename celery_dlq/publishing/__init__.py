"""The publish side: default delays."""
