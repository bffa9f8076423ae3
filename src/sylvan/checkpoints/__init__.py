"""Presents remote folders and GGUF files as Hugging Face model directories.

Start at `remote.fetch` (URLs), `gguf.view.gguf_view` (GGUF files) and `formats.weight_format`:
all other code reads the directories that they return. `headers` reads the table of a safetensors
file, `vocab` converts vocabularies to tokenizer.json. No tensors are loaded here: that is
`sylvan.runtime.models`.
"""
