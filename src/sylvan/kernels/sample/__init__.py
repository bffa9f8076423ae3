"""Sampling over the batch: penalties, masks, bias, drawing and log probabilities in one call."""
