"""The routes of the Responses API."""
