"""The public wire models and their conversion to and from protocol types."""
