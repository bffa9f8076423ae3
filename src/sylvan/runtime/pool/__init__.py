"""Memory for KV and recurrent states, on device and host."""
