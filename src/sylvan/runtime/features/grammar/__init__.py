"""Structured output: constrains generation by a schema, a regex or a grammar.

A request waits until its grammar is compiled (`control`; compile processes: `compiler`). Then
`worker` and `matchers.Matchers` restrict each sampled token by a bitmask (`masks`) and emit text
that the grammar forces (`forced`). `backends` has one module per library, `rewrite` converts
schemas to what the libraries support, `guard` checks what no library can enforce, `isolation` runs
libraries without resource limits in processes that can be killed. Start with `api`, then
`control`.
"""
