"""Bodies of the OpenAI API, and their conversion."""
