"""Runners that replay a recorded forward pass instead of running the model's Python."""
