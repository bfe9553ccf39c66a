"""How a letter is spelled: JSON, its fingerprint, and how it lies in a Redis entry."""
