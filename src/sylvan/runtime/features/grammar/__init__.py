"""Structured output: constrains generation by a schema, a regex or a grammar."""
