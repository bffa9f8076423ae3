"""The built-in kinds of devices, one file each."""
