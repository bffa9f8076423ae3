"""One package per capability."""
