"""A demo on vLLM's real server, in this process; its engine is a child."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2] / "scripts"))


def run_demos(
    model: str, policy: str, settings: str, talks: list[str]
) -> list[dict[str, Any]]:
    """Serve a model with a policy and answer the demo's questions.

    Args:
        policy: ``none`` is stock vLLM.
        settings: JSON; empty: the demo's own.

    Returns:
        ``Result.as_json()`` per talk.
    """
    import uvloop
    from vllm.entrypoints.launchers.api_server.entry import run_server
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from vllm_kvplugins.vllm_adapter.startup import flags

    flags.install()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    from _demo_kinds import plan_of

    plan = plan_of(policy, settings)
    command = ["--model", model, "--host", "127.0.0.1", "--port", str(port)]
    command += ["--served-model-name", "m", "--enforce-eager", "--dtype", "float32"]
    command += ["--num-gpu-blocks-override", "160", "--block-size", "32"]
    command += ["--max-model-len", "4096"]  # the prompts fit into these blocks
    if policy != "none":
        command += ["--kv-policy", policy]
        if plan.settings:
            command += ["--kv-policy-config", plan.settings]
    arguments = make_arg_parser(FlexibleArgumentParser()).parse_args(command)
    results: list[dict[str, Any]] = []
    client = threading.Thread(target=_ask, args=(port, plan, talks, results))
    client.start()
    uvloop.run(run_server(arguments))  # until the client sends SIGTERM
    client.join()
    return results


def _ask(port: int, plan: Any, talks: list[str], results: list[dict[str, Any]]) -> None:
    from dataclasses import replace

    from _demo_client import Server, is_ready
    from _demo_kinds import run_talk
    from _demo_talks import TALKS
    from demo import episodes_in

    try:
        base = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + 200
        while not is_ready(base):
            assert time.monotonic() < deadline, "the server is not ready in time"
            time.sleep(0.2)
        server = Server.connect(base)
        for talk in talks:
            with tempfile.NamedTemporaryFile(suffix=".log") as log:
                _keep_debug_messages(log.name)
                result = run_talk(server, replace(plan, talk=talk), TALKS[talk]())
                if plan.encoder:
                    result.episodes = episodes_in(Path(log.name).read_text())
            results.append(result.as_json())
    finally:
        os.kill(os.getpid(), signal.SIGTERM)


def _keep_debug_messages(path: str) -> None:
    """Read episodes from debug messages instead of a server's log."""
    from vllm_kvplugins.vllm_adapter.frontend import chat_episodes

    # vLLM removes the handlers of its own loggers while it configures them.
    chat_episodes.logger = logging.Logger("test", logging.DEBUG)
    chat_episodes.logger.addHandler(logging.FileHandler(path))
