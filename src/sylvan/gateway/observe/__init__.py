"""What operators see of the gateway: metrics, access log, traces."""
