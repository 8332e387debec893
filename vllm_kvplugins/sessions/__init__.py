"""Sessions: what a request computed, kept for the one that continues it.

::

    request ends ──> Keeper (scheduler) ──Save──> Vault (worker): pages to host memory
    prompt that begins with those tokens ──Load──> pages back into the pool
    no room ──> dropped, or left to its file; restart ──> files are found again

The keeper decides and counts, tensor-free; the vault holds the bytes and obeys.
"""
