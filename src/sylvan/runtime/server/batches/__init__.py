"""Files, and batches of requests that run in the background."""
