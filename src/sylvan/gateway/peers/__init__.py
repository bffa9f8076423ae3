"""What the processes of one gateway tell each other, so that they route as one."""
