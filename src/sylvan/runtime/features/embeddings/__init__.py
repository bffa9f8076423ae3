"""Vectors, scores and labels of texts: pooled from hidden vectors, without sampling."""
