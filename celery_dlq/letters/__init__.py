"""What a letter is: its fields, and its forms in Redis, JSON, exports and Spark."""
