"""How workers are spoken to over HTTP."""
