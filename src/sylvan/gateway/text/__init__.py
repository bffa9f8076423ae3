"""Tokenizers, templates and parsers of the models behind the gateway."""
