"""Pass-through to servers of the OpenAI API: a model catalogue with fallbacks."""
