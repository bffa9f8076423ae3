"""How much is let in, and how often it is tried."""
