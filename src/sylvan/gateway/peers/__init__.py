"""State shared between the processes of one gateway, so that they route as one."""
