"""Runs step programs through JAX: one compiled function per bucket of rows and pages."""
