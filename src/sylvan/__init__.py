"""Sylvan: serve language models, and program them."""
