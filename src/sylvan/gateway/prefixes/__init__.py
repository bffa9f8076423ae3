"""Which worker has cached which prefix: estimated from placements, or exact from cache events."""
