"""Recurrent states of layers without attention, for requests and cached prefixes."""
