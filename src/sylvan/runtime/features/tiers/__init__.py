"""KV of cached prefixes in a store: written there, found again, and loaded back."""
