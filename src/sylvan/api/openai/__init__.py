"""Wire models of the OpenAI API, and their conversion."""
