"""Capabilities, one package each."""
