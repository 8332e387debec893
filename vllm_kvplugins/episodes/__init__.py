"""Finds the part of a long conversation that a new query is about (EpiCache).

::

    messages ──> utterances ──> segments of 4 ──encoder──> K-Means ──> episodes
    query ──encoder──> nearest centroid ──> episode ──> its guide (patched prompt)

This is the front end's half of EpiCache (section 3.1). It works on texts and vectors,
not on tokens or caches, and imports neither vLLM nor torch.
"""
