"""A stand-in for ``vllm serve`` that answers demos: no model, no vLLM.

Answers /health, /v1/models, /metrics and streamed chats. A policy frees blocks and
counts what it does; ``FAKE_REFUSES`` names a policy that is refused at start-up.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

BLOCK, POOL = 32, 101
_ANSWERS = {
    "balcony": "Tomatoes.",
    "instrument": "The piano.",
    "cheese": "Parmesan.",
    "seeds": "Every two weeks.",
}


class State:
    """The state that the server reports."""

    policy = ""
    held = 0
    lazy = False  # a policy that has no effect
    counts: dict[str, float] = {}  # noqa: RUF012
    # Set when /metrics showed the held blocks. An answer waits for it, because on a
    # busy machine the demo may not look in the few milliseconds that an answer takes.
    metrics_read = threading.Event()


def count(**amounts: float) -> None:
    for name, amount in amounts.items():
        State.counts[name] = State.counts.get(name, 0.0) + amount


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.0"

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        if self.path == "/v1/models":
            self.wfile.write(json.dumps({"data": [{"id": "m"}]}).encode())
        elif self.path == "/metrics":
            held = State.held
            self.wfile.write(metrics().encode())
            if held:
                State.metrics_read.set()

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.end_headers()
        text = " ".join(message["content"] for message in body["messages"])
        prompt_tokens = len(text) // 4
        whole = -(-prompt_tokens // BLOCK)
        acts = State.policy and State.policy != "full" and not State.lazy
        State.metrics_read.clear()
        State.held = 6 if acts else whole
        if acts:
            count(compressions=1, blocks_freed=whole - 6)
            count(selected_tokens=100, fetched_tokens=50)
            if len(body["messages"]) > 1:
                count(session_hits=1, session_restored_tokens=prompt_tokens)
        self.wfile.write(b'data: {"choices": [{"delta": {"role": "assistant"}}]}\n\n')
        for piece in (answer_to(body["messages"][-1]["content"], text), "<|im_end|>"):
            self.event({"choices": [{"delta": {"content": piece}}]})
        for _ in range(6 if body["ignore_eos"] else 0):
            self.event({"choices": [{"delta": {"content": " more"}}]})
        State.metrics_read.wait(timeout=5)
        usage = {"prompt_tokens": prompt_tokens, "completion_tokens": 8}
        self.event({"choices": [], "usage": usage})
        self.wfile.write(b"data: [DONE]\n\n")
        State.held = 0

    def event(self, data: object) -> None:
        time.sleep(0.005)
        self.wfile.write(f"data: {json.dumps(data)}\n\n".encode())
        self.wfile.flush()


def answer_to(question: str, text: str) -> str:
    if "pass key" in question:
        return f"It is {text.partition('The pass key is ')[2][:5]}."
    known = (reply for word, reply in _ANSWERS.items() if word in question)
    return next(known, "Yellow.")


def metrics() -> str:
    lines = [
        f'vllm:cache_config_info{{block_size="{BLOCK}",num_gpu_blocks="{POOL}"}} 1.0',
        f'vllm:kv_cache_usage_perc{{engine="0"}} {State.held / (POOL - 1)}',
        f'vllm:kv_policy_host_bytes{{engine="0"}} {3 * 2**20}',
    ]
    for name, value in State.counts.items():
        lines.append(f'vllm:kv_policy_{name}_total{{engine="0"}} {value}')
    return "\n".join(lines) + "\n"


def server(policy: str = "", port: int = 0, lazy: bool = False) -> ThreadingHTTPServer:
    """A server in this process; only one at a time."""
    State.policy, State.lazy, State.held, State.counts = policy, lazy, 0, {}
    return ThreadingHTTPServer(("127.0.0.1", port), Handler)


def option(name: str) -> str:
    return sys.argv[sys.argv.index(name) + 1] if name in sys.argv else ""


def main() -> None:
    policy = option("--kv-policy")
    if policy and policy == os.environ.get("FAKE_REFUSES"):
        print("INFO loading")
        sys.exit("error: KV policy cannot run here:\n  1. [KVP019] fp8; use bfloat16")
    if notes := os.environ.get("FAKE_NOTES"):
        with open(notes, "a") as out:
            out.write(" ".join(sys.argv[1:]) + "\n")
    if policy == "epicache":
        print(*(f"episode {i} of 4 (cosine 0.50, switched: None)" for i in range(4)))
        sys.stdout.flush()
    server(policy, int(option("--port"))).serve_forever()


if __name__ == "__main__":
    main()
