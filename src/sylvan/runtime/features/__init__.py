"""Capabilities, one package each.

A capability has a control half (`control.py`), which runs on the scheduler's thread and implements
`sched.capability.Capability`, and usually a worker half (`worker.py`), which runs beside the model
and implements `executor.capability.CapabilityWorker`. The messages between them are in `work.py`;
`build.py` makes both from the configuration. `standard` and `standard_workers` list the halves
that every server has.
"""
