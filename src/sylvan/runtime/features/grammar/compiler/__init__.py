"""Compiles grammars in processes that can be killed, under limits on time and memory."""
