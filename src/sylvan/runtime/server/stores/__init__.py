"""Stores that persist between calls: responses, files, batches."""
