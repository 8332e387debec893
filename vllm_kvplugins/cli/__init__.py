"""``kvplugins``: what there is, whether it can run, and what it does.

One module per subcommand; ``app`` lists them. Nothing here imports vLLM; what
needs an engine goes through ``vllm_adapter``.
"""

from __future__ import annotations

from vllm_kvplugins.cli.app import app, main

__all__ = ["app", "main"]
