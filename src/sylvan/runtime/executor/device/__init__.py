"""Steps on a device that works beside the CPU: one upload, launches, one event, one download."""
