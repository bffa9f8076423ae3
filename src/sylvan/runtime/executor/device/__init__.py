"""Asynchronous steps on a device: one upload, kernel launches, one event, one download.

`build` measures the device's memory and builds the executor, `backend` queues its steps, and
`pending_sample` holds the results until they are on the host.
"""
