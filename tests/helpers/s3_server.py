"""A local server with the interface of S3, and a bucket in it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

BUCKET = "sessions"


@contextmanager
def s3_server() -> Iterator[dict[str, str]]:
    """The environment variables with which clients find the server.

    Skips the test where moto or s3fs are missing; both are in the extra ``full-tests``.
    """
    pytest.importorskip("s3fs", reason="install s3fs (extra dev)")
    server_module = pytest.importorskip("moto.server", reason="install moto[server]")
    import boto3

    server = server_module.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    try:
        _, port = server.get_host_and_port()
        environment = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
        with pytest.MonkeyPatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            boto3.client("s3").create_bucket(Bucket=BUCKET)
            yield dict(os.environ) | environment
    finally:
        server.stop()
