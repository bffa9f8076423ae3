"""Request and response bodies of the public APIs, and their conversion to protocol types."""
