"""Early start: requests that need PyTorch wait until it has been imported; others run meanwhile."""
