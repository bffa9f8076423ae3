"""Runners that replay a recorded forward pass instead of running the model's Python.

`program` traces and runs step programs of native ops, `buckets` captures and replays graphs of a
device. The other modules decide how much of a model runs natively: `partial` leaves some modules of
a program to PyTorch, `layers` replaces single layers of a native model, and `linears`, `routers`
and `rotary` replace parts of a transformers model.
"""
