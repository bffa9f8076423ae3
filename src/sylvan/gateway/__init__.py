"""Routes requests to many runtimes by cached prefix and load, and survives worker failures."""
