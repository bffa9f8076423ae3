"""Runs the real scheduler, cache and routing policies on a virtual clock (`sylvan simulate`)."""
