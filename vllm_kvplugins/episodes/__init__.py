"""Episodes: which part of a long conversation a new question is about.

::

    messages ──> utterances ──> segments of 4 ──encoder──> K-Means ──> episodes
    question ──encoder──> nearest centroid ──> episode ──> its guide (patched prompt)

The front end's half of EpiCache (section 3.1). It knows texts and vectors, neither
tokens nor caches, and imports neither vLLM nor torch.
"""
