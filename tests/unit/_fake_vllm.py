"""A stand-in for the ``vllm`` command line: streams answers without a model.

``serve`` answers ``/health``, ``/metrics``, ``/tokenize`` and streamed chat
completions, and starts a child, as vLLM starts its engine; ``bench serve`` writes a
result. Both record their arguments and requests in the folder that FAKE_VLLM names.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path

FOLDER = Path(os.environ["FAKE_VLLM"])
TOKEN_S = 0.03
answered = 0


def option(name: str, default: str = "") -> str:
    """The value after ``name`` on the command line."""
    return sys.argv[sys.argv.index(name) + 1] if name in sys.argv else default


def note(file: str, line: str) -> None:
    with (FOLDER / file).open("a") as out:
        out.write(line + "\n")


def metrics() -> str:
    blocks = option("--num-gpu-blocks-override", "11")
    lines = [
        "# HELP vllm:kv_cache_usage_perc usage",
        f'vllm:cache_config_info{{block_size="32",num_gpu_blocks="{blocks}"}} 1.0',
        'vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.5',
        f'vllm:num_preemptions_total{{engine="0",model_name="m"}} {answered}.0',
        'vllm:num_requests_running{engine="0",model_name="m"} 2.0',
        f'vllm:prompt_tokens_total{{engine="0"}} {8 * answered}.0',
        f'vllm:request_prefill_kv_computed_tokens_sum{{engine="0"}} {2 * answered}.0',
    ]
    if option("--kv-policy"):
        lines.append('vllm:kv_policy_host_bytes{engine="0"} 2.097152e+06')
        lines.append('vllm:kv_policy_device_table_bytes{engine="0"} 4096.0')
        lines.append('vllm:kv_policy_session_bytes{engine="0"} 1.048576e+06')
    return "\n".join(lines) + "\n"


def count_tokens(body: dict) -> int:
    """As a chat template without the part that FAKE_TEMPLATE_LACKS names."""
    messages, lacks = body["messages"], os.environ.get("FAKE_TEMPLATE_LACKS")
    written = [m for m in messages if m["role"] != lacks]
    count = sum(len(m["content"].split()) for m in written)
    count += (
        3 * sum(len(m.get("tool_calls", ())) for m in messages) * (lacks != "calls")
    )
    return count + 5 * len(body.get("tools", ())) * (lacks != "tools")


async def stream(body: dict, writer: asyncio.StreamWriter) -> None:
    def send(delta: dict | None, tokens: int) -> None:
        usage = {"completion_tokens": tokens, "prompt_tokens": 7}
        choices = [] if delta is None else [{"delta": delta}]
        data = json.dumps({"choices": choices, "usage": usage})
        writer.write(f"data: {data}\n\n".encode())

    send({"role": "assistant", "content": ""}, 0)
    for index in range(body["max_tokens"]):
        await asyncio.sleep(TOKEN_S)
        send({"content": f"{len(body['messages'])}.{index} "}, index + 1)
        await writer.drain()
    send(None, body["max_tokens"])
    writer.write(b"data: [DONE]\n\n")


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    global answered
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    path = head.split()[1]
    length = next(
        (
            int(line.split(":")[1])
            for line in head.splitlines()
            if line.lower().startswith("content-length")
        ),
        0,
    )
    body = await reader.readexactly(length)
    status = 200
    if path == "/v1/chat/completions" and option("--refuse"):
        status = 400
    reply = f"HTTP/1.1 {status} -\r\nConnection: close\r\n\r\n"
    writer.write(reply.encode())
    if path == "/v1/models":
        model = {"id": "m", "root": sys.argv[2]}
        writer.write(json.dumps({"data": [model]}).encode())
    elif path == "/metrics":
        writer.write(metrics().encode())
    elif path == "/tokenize":
        writer.write(json.dumps({"count": count_tokens(json.loads(body))}).encode())
    elif path == "/v1/chat/completions" and status == 200:
        note("requests", body.decode())
        await stream(json.loads(body), writer)
        answered += 1
    elif status != 200:
        writer.write(b"too long")
    writer.close()


async def serve() -> None:
    child = subprocess.Popen(["sleep", "600"])
    note("pids", f"{os.getpid()} {child.pid}")
    note("serve", json.dumps(sys.argv[2:]))
    server = await asyncio.start_server(answer, "127.0.0.1", int(option("--port")))
    await server.serve_forever()


def bench() -> None:
    note("bench", json.dumps(sys.argv[3:]))
    names = [f"p{p}_{name}_ms" for p in (50, 99) for name in ("ttft", "tpot", "itl")]
    result = dict.fromkeys(names, 12.5) | {
        "duration": 1000.0,
        "completed": 3,
        "failed": 1,
    }
    result |= {"total_input_tokens": 30, "total_output_tokens": 12}
    result |= {"request_throughput": 15.0, "output_throughput": 60.0}
    result |= {"request_goodput": 10.0, "errors": ["", "", "", "refused"]}
    # Long enough that even a busy machine takes a sample of it.
    result["start_times"] = [time.perf_counter() - 500, time.perf_counter()]
    if option("--dataset-name") == "custom":
        # The last of two paths counts, as in argparse. Answers the first two lines.
        dataset = sys.argv[len(sys.argv) - sys.argv[::-1].index("--dataset-path")]
        lines = [json.loads(line) for line in Path(dataset).read_text().splitlines()]
        texts = [f"It is {line['answer']}." for line in lines]
        result["generated_texts"] = texts[:2] + [""] * (len(lines) - 2)
    path = Path(option("--result-dir")) / option("--result-filename")
    path.write_text(json.dumps(result))


if __name__ == "__main__":
    if option("--kv-policy") == os.environ.get("FAKE_FAILS", "-"):
        sys.exit("this policy does not fit this model")
    if option("--kv-cache-dtype") == os.environ.get("FAKE_FAILS", "-"):
        sys.exit("Traceback\nValueError: no fp8 on this platform")
    if sys.argv[1] == "serve":
        asyncio.run(serve())
    else:
        bench()
