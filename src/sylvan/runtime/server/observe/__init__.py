"""What operators see: metrics, traces, logs of requests, profiles."""
