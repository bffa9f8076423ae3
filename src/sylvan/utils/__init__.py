"""Leaf helpers: clock, threads, plug-in packages."""
