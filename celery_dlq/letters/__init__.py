"""Codecs of a letter, which stores, exports and Spark share."""
