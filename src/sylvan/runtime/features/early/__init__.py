"""Requests that need PyTorch wait until it has been imported."""
