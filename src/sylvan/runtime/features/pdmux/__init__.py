"""Prefill-decode multiplexing: computes prompts between decode steps, on the same device."""
