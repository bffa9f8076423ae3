"""Fetches, decodes and prepares images, videos and audio of clients; imports no torch."""
