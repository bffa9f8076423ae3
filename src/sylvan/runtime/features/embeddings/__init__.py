"""Embeddings, scores and labels of texts: pooled from hidden states, without sampling."""
