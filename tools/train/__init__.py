"""Training of sapling, the model that ships with Sylvan: `python -m tools.train` does it all."""
