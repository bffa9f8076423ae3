"""Routes of the gateway itself: workers, health, loads, models."""
