"""Where checkpoints come from: remote folders and GGUF files, as Hugging Face directories."""
