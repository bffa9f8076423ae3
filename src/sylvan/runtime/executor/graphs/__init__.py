"""Runners that replay a recorded forward pass instead of walking the model's Python."""
