"""Authentication: client keys, operator keys and tokens, and the audit log."""
