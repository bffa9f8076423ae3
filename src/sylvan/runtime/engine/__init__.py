"""Composition root: builds objects from the configuration, and runs them in processes.

Owns which objects exist and which process runs them; nothing below imports it. Start with
`build.build_scheduler` (scheduler, executor and capabilities of a configuration), then
`scheduler_loop` (a scheduler fed by messages), `supervisor` and `roles` (child processes),
`runtime.Runtime` (what the API process starts), and `engine.Engine` (`sylvan.Engine`). Ranks on
several machines: `ranks`, `nodes` on node 0, `node_agent` on the others.
"""
