"""Why requests hit or missed the prefix cache, and what the cache holds."""
