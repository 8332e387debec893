"""The command ``kvplugins``: lists, checks, sizes, explains and trains policies.

One module per subcommand; ``app`` lists them. Only ``vllm_adapter`` imports vLLM, so
subcommands that need an engine call it.
"""

from __future__ import annotations

from vllm_kvplugins.cli.app import app, main

__all__ = ["app", "main"]
