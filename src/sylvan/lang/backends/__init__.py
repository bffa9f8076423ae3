"""Model services that programs run on: one module each."""
