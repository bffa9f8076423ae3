"""The runtimes behind the gateway: which there are, how they fare, and how busy they are."""
