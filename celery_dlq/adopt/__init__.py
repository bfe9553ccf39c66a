"""Letters made of messages that a broker dead-lettered itself."""
