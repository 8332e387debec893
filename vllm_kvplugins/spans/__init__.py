"""Context at several resolutions: spans cut at surprising tokens (SeKV).

``segmentation`` decides which tokens stay resident and which form spans. ``coarse``
computes the one key and value that stand for a span.
"""
