"""Fetches messages from Amazon SQS, and renews their visibility while they run or wait."""
