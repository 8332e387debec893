#!/usr/bin/env bash
# Runs the tests of the CUDA ops under compute-sanitizer: memcheck, racecheck,
# synccheck. Needs a GPU, a torch with CUDA and an extension built with it.
#
# Usage: scripts/check_compute_sanitizer.sh [pytest arguments]
#        (PYTHON=... names an interpreter that has torch; COMPUTE_SANITIZER=... the tool)
# Exits 0 and prints "skipped: ..." where one of these is missing; 1 on a finding or a
# failed test.
set -euo pipefail
cd "$(dirname "$0")/.."

tool="${COMPUTE_SANITIZER:-$(command -v compute-sanitizer || true)}"
python="${PYTHON:-python3}"
if [[ -z "$tool" ]]; then
  echo "skipped: no compute-sanitizer"
  exit 0
fi
missing="$("$python" -c '
import torch
from vllm_kvplugins.ops.extension import load_extension
extension = load_extension()
if not torch.cuda.is_available():
    print("torch", torch.__version__, "sees no GPU")
elif extension.reason or not extension.has_cuda:
    print(extension.reason or "the extension was built without CUDA")')" \
  || { echo "error: $python cannot say what it has; set PYTHON" >&2; exit 1; }
if [[ -n "$missing" ]]; then
  echo "skipped: $missing"
  exit 0
fi

# torch's caching allocator would hide reads beyond a tensor.
export PYTORCH_NO_CUDA_MEMORY_CACHING=1
for check in memcheck racecheck synccheck; do
  options=(--tool "$check")
  # One test unpins what is not pinned, to see it refused.
  [[ "$check" == memcheck ]] && options+=(--report-api-errors no)
  # A test that wants a trap has it in a process of its own, which is not checked.
  "$tool" "${options[@]}" --error-exitcode 1 --target-processes application-only \
    "$python" -m pytest -q -p no:cacheprovider tests/unit/test_cuda_ops.py "$@"
  echo "ok: $check"
done
