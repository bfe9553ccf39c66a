"""Letters to dead-letter exchanges, so that other services hear of them."""
