"""Runners that replay a forward pass instead of walking the model's Python."""
