"""A triage for people: a PNG and an HTML page, with the same charts."""
