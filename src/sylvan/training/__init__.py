"""Trains draft heads and context trees for speculative decoding, from a model's own answers.

`train.train_draft` (`sylvan train-draft`) reads prompts (`prompts`), lets the model answer them and
stores its hidden states (`answers`), trains an EAGLE-3 head on those (`head`, `loop`), and measures
it on held-out prompts (`evaluate`). `train.train_contexts` builds a context tree instead
(`contexts`). How heads and trees draft: `sylvan.runtime.features.speculation`.
"""
