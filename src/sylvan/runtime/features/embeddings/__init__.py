"""Embeddings, scores and labels of texts: pooled from hidden states, without sampling.

`control.EmbeddingCapability` chooses the slices to pool; `worker` passes their rows to a
`pooling.Pooler`.
"""
