"""Block diffusion: all tokens of a block are generated together, in several forward passes."""
