"""Trained routers: which spans a query wants to see, learned from attention (SeKV).

``router`` is what serving needs, ``files`` how it is kept; the rest makes one:
``teacher`` runs the model, ``examples`` turn what it saw into targets, ``student``
runs it again under a router, ``losses`` compare the two, ``training`` does so many
times, ``report`` says how well that went.
"""
