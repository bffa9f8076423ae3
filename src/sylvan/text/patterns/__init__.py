"""Regular expressions matched while text arrives, in time linear in the text."""
