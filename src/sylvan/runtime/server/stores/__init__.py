"""What the server keeps between calls: responses, files, batches."""
