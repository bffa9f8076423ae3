"""Grammar libraries, one per file; the file name is the option's value."""
