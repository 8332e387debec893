"""The worker process: workers, model hooks and the context that they share."""
