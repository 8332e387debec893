"""What the adapter reads from vLLM configurations and checks at start-up."""
