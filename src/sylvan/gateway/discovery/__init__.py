"""Where workers are that come and go: one source a file."""
