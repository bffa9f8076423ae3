"""Channels between processes: in one process, over pipes, over ZeroMQ."""
