"""Runs steps of a saved program until a request needs PyTorch. Imports no torch.

`key` finds the program that an earlier start saved in the load cache, `file` reads it, and
`executor` runs it and later hands over to the full executor.
"""
