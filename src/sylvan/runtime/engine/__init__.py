"""Composition root: wires objects from config, runs them in processes."""
