"""Text to ids and back, as processes around sylvan.text."""
