"""Text diffusion in blocks: all tokens of a block are found together, in several forward passes."""
