"""What happens from a death to its stored letter: the letter is made, written, or waits on disk."""
