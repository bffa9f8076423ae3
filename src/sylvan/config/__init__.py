"""The one configuration tree: load it from all sources, resolve what is `auto`, check the rest."""
