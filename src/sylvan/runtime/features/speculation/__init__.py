"""Speculative decoding: guess what follows, and verify several guesses by one forward pass."""
