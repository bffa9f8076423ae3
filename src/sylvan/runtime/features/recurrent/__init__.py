"""Recurrent states of layers without attention, kept for requests and cached prefixes."""
