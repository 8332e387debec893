"""Shared mathematics of policies: attention votes, prototypes, selection, RoPE."""
