"""Serves LoRA adapters next to the base model, several in one step."""
