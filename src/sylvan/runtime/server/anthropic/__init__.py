"""The routes of the Anthropic API."""
