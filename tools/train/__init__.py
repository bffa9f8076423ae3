"""Trains sapling, the model that ships with Sylvan: `python -m tools.train` runs all stages.

Start at `run.main`: it trains the tokenizer (`tokenizer`), then the model (`loop`, `model`,
`optim`) on generated conversations (`data`, batched by `rows`), exports a Hugging Face directory
(`export`) and scores it (`evaluate`, `judge`). `vision` adds an image encoder.
"""
