"""Vocabularies in other formats, rewritten as tokenizer.json: no library is needed for that."""
