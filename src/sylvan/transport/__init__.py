"""Channels between processes: in-process, over pipes, over ZeroMQ."""
