"""Runs steps of a saved program until a request needs PyTorch. Imports no torch."""
