"""A triage as people see it: a picture and a page, both with the charts of one module."""
