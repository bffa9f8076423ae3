"""Where pages of KV outlive the process: stores by URL, and the format of what they keep."""
