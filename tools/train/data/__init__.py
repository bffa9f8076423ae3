"""Generated conversations: one module for each group of skills, and `mix` to draw from all."""
