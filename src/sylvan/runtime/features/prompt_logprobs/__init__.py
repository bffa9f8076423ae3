"""Log probabilities of prompt tokens."""
