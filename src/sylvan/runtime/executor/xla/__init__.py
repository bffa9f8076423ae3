"""Runs step programs through JAX: one compiled function for each bucket of rows and pages."""
