"""The routes of the OpenAI API."""
