"""Routes requests over many runtimes: by cached prefix and load, across failures."""
