"""Dead letters in PySpark: a data source, the triage of exported folders, and its charts.

Importing these modules imports neither PySpark nor matplotlib; their functions do.
"""
