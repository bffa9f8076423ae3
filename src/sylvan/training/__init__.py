"""Trains draft heads for speculative decoding, from what a model itself says."""
