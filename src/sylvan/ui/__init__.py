"""The web UI: its built files, as servers and gateways send them. Sources are in `ui/`."""
