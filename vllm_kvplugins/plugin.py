"""Entry point of the plugin, which vLLM calls at the start of every process.

Wraps three methods of vLLM's ``EngineArgs``: ``add_cli_args`` and ``from_cli_args``,
which add ``--kv-policy`` and ``--kv-policy-config``, and ``create_engine_config``,
which applies the policy. The plugin changes nothing else in vLLM until a process
configures an engine with a policy.
"""

from __future__ import annotations

import warnings


def register() -> None:
    """Add the flags; entry point of the group ``vllm.general_plugins``; idempotent.

    vLLM does not catch exceptions of plugins. On a vLLM version without the methods
    that we wrap, warn and stay inactive.
    """
    try:
        from vllm_kvplugins.vllm_adapter.startup.flags import install

        install()
    except (ImportError, AttributeError) as error:
        warnings.warn(
            "vllm_kvplugins is inactive and --kv-policy is not available, because this "
            f"vLLM lacks a method that it wraps ({type(error).__name__}: {error}); "
            "install a supported vLLM",
            RuntimeWarning,
            stacklevel=2,
        )
