"""The process behind ``harness.run_scenario``."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path


def main(request_path: str, result_path: str) -> None:
    request = json.loads(Path(request_path).read_text())
    module, _, function = request["scenario"].partition(":")
    result = getattr(import_module(module), function)(**request["arguments"])
    Path(result_path).write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
