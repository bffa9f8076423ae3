"""Store backends, one module each; the module name is the URL scheme."""
