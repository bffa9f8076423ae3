"""Prefill-decode disaggregation: transfers the KV of prompts between servers."""
