"""Prompts computed between the steps of requests that decode, on the same device."""
