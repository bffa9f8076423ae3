"""Libraries that compile grammars, one per file; the file's name is the option's."""
