"""Chooses a policy for a model, its memory and its requests, from measurements.

``decision.decide`` is the only place that chooses: ``kvplugins recommend`` and
``--kv-policy auto`` call it with the same kind of request. Needs neither torch nor
vLLM.
"""

# Stands for a policy, and therefore is the name of none.
AUTO = "auto"
