"""The routes of the Ollama API."""
