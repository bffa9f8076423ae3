"""Prefill-decode multiplexing: computes prompts between decode steps, on the same device.

`control.PrefillBetween` gives a long prompt its memory and lets it load;
`worker.InterleavedPrefillWorker` computes it op by op, for a bounded time after each step.
"""
