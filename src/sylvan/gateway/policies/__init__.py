"""Routing policies: select a worker for each request. The file name is the option's value."""
