"""Asynchronous steps on a device: one upload, kernel launches, one event, one download."""
