"""Log probabilities of prompt tokens.

`control` selects the rows that predict prompt tokens; `worker` computes them.
"""
