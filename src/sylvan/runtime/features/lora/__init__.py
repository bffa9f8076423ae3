"""Serves LoRA adapters next to the base model, several in one step.

`control.Lora` decides which adapters are resident (`copies` in host memory, `slots` on the device)
and which request starts (`slot_queue`); `worker.LoraWorker` reads them (`store`) and applies them.
`adapters.LoraAdapters` loads the configured ones, and those that clients name later.
"""
