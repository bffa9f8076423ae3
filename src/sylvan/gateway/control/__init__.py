"""The gateway's own routes: workers, health, loads, models."""
