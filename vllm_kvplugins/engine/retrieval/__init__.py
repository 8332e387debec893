"""Retrieval: offloaded tokens, their indices, and the hot slots for fetched tokens."""
