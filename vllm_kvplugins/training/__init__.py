"""Offline training of SeKV routers, and measurement of layer sensitivities.

Never imported while serving (``tests/unit/test_training_is_offline.py``).

``teacher`` runs the model with full attention, ``examples`` turns the result into
targets, ``student`` runs the model with the spans that a router chooses, ``losses``
compares both, ``loop`` trains, ``thresholds`` and ``report`` evaluate.
``sensitivity`` measures layers for the allocator of the same name.
"""
