"""Records every input and decision of a scheduler, and replays them without a model.

`control.FlightRecorder` writes the format in `recording`; `replay.replay` reads it.
"""
