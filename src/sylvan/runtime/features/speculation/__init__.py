"""Speculative decoding: drafts tokens, and verifies several drafts in one forward pass."""
