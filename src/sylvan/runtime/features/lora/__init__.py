"""Serves LoRA adapters beside the base model, several in one step."""
