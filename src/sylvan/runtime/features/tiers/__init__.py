"""KV tiers: copies cached prefixes to host memory and a store, and loads them back."""
