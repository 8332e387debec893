"""The worker side of a policy: page tables, compaction, retrieval and spans.

Imports no vLLM.
"""
