"""Exported letters in PySpark: where they are read, counted over millions and drawn.

Importing these modules imports neither PySpark nor matplotlib; their functions do.
"""
