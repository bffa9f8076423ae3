"""Service discovery: sources that list the current workers, one per file."""
