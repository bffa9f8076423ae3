"""KV stores that outlive the process, by URL, and their record format."""
