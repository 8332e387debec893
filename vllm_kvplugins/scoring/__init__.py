"""Shared mathematics of policies: votes, prototypes, k-means, selection, RoPE."""
