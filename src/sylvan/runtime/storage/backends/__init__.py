"""Kinds of stores, one module each; the name of the module is the scheme of the URL."""
