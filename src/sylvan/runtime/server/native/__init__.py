"""The routes of the native API."""
