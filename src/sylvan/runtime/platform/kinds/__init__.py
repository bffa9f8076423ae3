"""The kinds of devices that this package knows, one file each."""
