"""Attention backends, one file each; reference.py is the definition of correct."""
