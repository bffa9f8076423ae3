"""Training of sapling-vision, sapling with eyes: `python -m tools.train.vision`."""
