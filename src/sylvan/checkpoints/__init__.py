"""Presents remote folders and GGUF files as Hugging Face model directories."""
