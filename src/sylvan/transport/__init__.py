"""Channels between processes: in-process, over pipes, over ZeroMQ.

Owns how messages travel: interfaces (`api`), encoding (`codec`; large arrays through shared memory:
`arrays`), and one module per kind of channel: threads of one process (`inproc`), processes of one
machine (`zmq`), machines (`hub`). The messages themselves are in `sylvan.protocol`. Start with
`api.MessageSender` and `api.MessageReceiver`.
"""
