"""Files, and batches of requests that are worked off when there is time."""
