"""Helpers that import nothing else of Sylvan but errors: clock, threads, tasks, plug-ins, logging.

One small module per subject; there is no entry point.
"""
