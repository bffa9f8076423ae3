"""Batch sampling in one call: penalties, masks, bias, drawing and log probabilities."""
