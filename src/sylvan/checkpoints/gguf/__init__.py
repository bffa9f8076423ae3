"""GGUF files (of llama.cpp) as checkpoints in Hugging Face layout."""
