"""Compiles grammars in processes that can be killed, with limits on time and memory."""
