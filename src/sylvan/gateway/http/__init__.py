"""The HTTP router: from a client's request to workers' answers."""
