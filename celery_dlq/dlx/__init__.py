"""Letters published to a dead-letter exchange, once the broker lets them through."""
