"""Matches regular expressions while text arrives, in time linear in the text."""
