"""Encoders that transformers lacks, after the published code of their models."""
