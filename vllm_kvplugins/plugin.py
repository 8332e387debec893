"""vLLM's entry point: called once in every vLLM process, before anything runs.

It only adds the command-line flags and the configuration hook. Nothing else
changes until an engine is configured with a policy.
"""

from __future__ import annotations


def register() -> None:
    """Entry point of the group ``vllm.general_plugins``; safe to call again."""
    from vllm_kvplugins.vllm_adapter.flags import install

    install()
