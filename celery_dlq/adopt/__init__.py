"""Letters of messages that the broker itself dead-lettered."""
