#!/usr/bin/env bash
# Runs tests and reports which lines of the package ran, also in processes that they start.
set -euo pipefail

usage() {
  cat <<'HELP'
Usage: bash scripts/coverage.sh [pytest arguments]

Runs scripts/test.sh with these arguments (default: all tests) under coverage.py, and
prints the share of the package's lines that ran: in the tests, in the workers of
pytest-xdist and in every Python process that these start, vLLM's engines among them.
Lines per file go to build/coverage/report.txt, missing ones included.

  bash scripts/coverage.sh tests/unit

Tests take longer. Code in C++ does not count, nor do kernels that Triton
compiles. The exit code is that of the tests. Environment: as in test.sh --help.
HELP
}

if [[ "${1:-}" == -h || "${1:-}" == --help ]]; then
  usage
  exit 0
fi

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
folder="$root/build/coverage"
rm -rf "$folder"
mkdir -p "$folder"
# Absolute: processes that tests start run in folders of their own.
export COVERAGE_FILE="$folder/data" COVERAGE_RCFILE="$root/pyproject.toml" KVP_COVERAGE=1

code=0
bash "$root/scripts/test.sh" "${@:-tests}" || code=$?
python="${KVP_VENV:-$root/.venv}/bin/python"
cd "$root"
"$python" -m coverage combine --quiet
"$python" -m coverage report --show-missing >"$folder/report.txt"
"$python" -m coverage report --sort=cover | tail -n 30
exit "$code"
