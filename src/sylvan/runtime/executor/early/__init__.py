"""Steps of a saved program, until something needs PyTorch. Loads no torch."""
