"""GGUF files (of llama.cpp) as checkpoints in the usual layout."""
