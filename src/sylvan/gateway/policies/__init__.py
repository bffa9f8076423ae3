"""Routing policies: which of several workers takes a request. The file name is the option."""
