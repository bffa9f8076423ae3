"""The workers behind the gateway: their registry, health and load."""
