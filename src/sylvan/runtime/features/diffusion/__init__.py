"""Block diffusion: all tokens of a block are generated together, in several forward passes.

`control.Diffusion` adds a block of masked positions to a request's slice; `worker.DiffusionWorker`
computes the step and fills them.
"""
