"""Keeping recurrent states of prompts, so that their prefixes can be continued."""
