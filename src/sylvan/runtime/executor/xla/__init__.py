"""Runs step programs through JAX: one compiled function per bucket of rows and pages.

`build` lowers a traced model and loads its weights, `functions` compiles the buckets, and `runner`
packs each step into its bucket and calls the function.
"""
