"""``python -m vllm_kvplugins.cli`` is ``kvplugins``."""

from vllm_kvplugins.cli.app import main

main()
