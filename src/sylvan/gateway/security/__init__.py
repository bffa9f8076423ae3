"""Who may call what: keys of clients, keys and tokens of operators, and a log of what they did."""
