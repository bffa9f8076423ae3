"""Which worker holds which prefix: guessed from what was sent, or known from cache events."""
