"""Composition root: builds objects from the configuration, and runs them in processes."""
