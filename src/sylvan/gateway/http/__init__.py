"""The HTTP router: forwards clients' requests to workers and relays the answers."""
