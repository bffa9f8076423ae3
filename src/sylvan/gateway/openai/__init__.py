"""Pass-through to servers of the OpenAI API: which model is where, and who stands in for whom."""
