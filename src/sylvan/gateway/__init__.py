"""Routes over many runtimes."""
