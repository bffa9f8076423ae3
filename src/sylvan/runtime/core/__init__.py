"""Nouns: a request, one step's work, one step as the model sees it."""
