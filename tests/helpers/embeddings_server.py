"""A server of embeddings, as OpenAI-compatible ones answer."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class EmbeddingsServer:
    """Answers what ``answer`` makes of a request's body.

    Args:
        embed: the vector of a text.

    Attributes:
        requests: path, headers and body of each request.
        address: of the encoder, as the setting ``encoder`` takes it.
    """

    def __init__(self, embed: Callable[[str], list[float]]) -> None:
        self.embed = embed
        self.requests: list[tuple[str, Any, Any]] = []
        self.answer: Callable[[Any], tuple[int, bytes]] = self.embeddings
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                server.requests.append((self.path, self.headers, body))
                status, answer = server.answer(body)
                self.send_response(status)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *arguments: Any) -> None:
                """Print nothing."""

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.http.serve_forever, daemon=True).start()
        self.address = f"http://127.0.0.1:{self.http.server_port}/v1#some/encoder"

    def embeddings(self, body: Any) -> tuple[int, bytes]:
        rows = [
            {"index": i, "embedding": self.embed(text)}
            for i, text in enumerate(body["input"])
        ]
        return 200, json.dumps({"data": rows[::-1]}).encode()  # in any order

    def close(self) -> None:
        """Answer no longer."""
        self.http.shutdown()
        self.http.server_close()
