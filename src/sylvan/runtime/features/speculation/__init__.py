"""Speculative decoding: drafts tokens, and verifies several drafts in one forward pass.

Three control halves, by the source of drafts: `control.Speculation` asks a `Drafter` (`ngram`),
`model_control.ModelSpeculation` a smaller model (`draft_model`), `head_control.HeadSpeculation` has
draft heads draft in the worker half (`head_worker`, `medusa_worker`). How many drafts are verified
follows from acceptance rates (`acceptance`) and step times (`timing`, `cost`): `policy`, `depth`.
"""
