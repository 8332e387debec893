"""Context at several resolutions: spans between surprising tokens (SeKV).

``segmentation`` decides which tokens stay resident and which form spans. ``coarse``
computes the mean key and value of each span, ``chunk_means`` those of chunks of equal
length, for retrievers.
"""
