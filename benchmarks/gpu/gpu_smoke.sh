#!/usr/bin/env bash
# Everything that one GPU can say of this package in eight minutes; see gpu_smoke.py.
#
# Usage: benchmarks/gpu/gpu_smoke.sh MODEL OUT_DIR [options of gpu_smoke.py]
#
# PYTHON names an interpreter with torch and vLLM; this package need not be installed.
# MODEL is a folder with weights, such as what `kvplugins model` makes.
set -euo pipefail
cd "$(dirname "$0")/../.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
exec "${PYTHON:-python3}" benchmarks/gpu/gpu_smoke.py "$@"
