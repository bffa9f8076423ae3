"""Records every input and decision of a scheduler, and replays them without a model."""
