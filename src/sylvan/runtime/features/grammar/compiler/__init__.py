"""Proves, in processes that can be killed, that grammars compile within limits."""
