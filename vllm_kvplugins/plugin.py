"""vLLM's entry point: called once in every vLLM process, before anything runs.

It adds the command-line flags and the hook on ``EngineArgs.create_engine_config``. No
other function of vLLM is wrapped until a process configures an engine with a policy.
"""

from __future__ import annotations

import warnings


def register() -> None:
    """Entry point of the group ``vllm.general_plugins``; safe to call again.

    vLLM calls this without a safety net in every process, so a vLLM that we do
    not know must not die of it: the plugin then stays out and says why.
    """
    try:
        from vllm_kvplugins.vllm_adapter.startup.flags import install

        install()
    except (ImportError, AttributeError) as error:
        warnings.warn(
            f"vllm_kvplugins is inactive, --kv-policy is not available: this vLLM "
            f"lacks what it hooks into ({type(error).__name__}: {error})",
            RuntimeWarning,
            stacklevel=2,
        )
