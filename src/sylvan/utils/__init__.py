"""Leaf helpers: clock, plug-in packages."""
