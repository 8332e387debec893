#!/usr/bin/env bash
# Compile-checks csrc/*.cu with nvcc for sm_80, sm_90a and sm_100. Needs no GPU and no
# CUDA torch.
#
# Usage: scripts/check_cuda_compile.sh        (PYTHON=... names an interpreter
#        that has torch, for its headers; NVCC=... names the compiler)
# Exits 0 and prints "skipped: ..." where nvcc, or an architecture that it knows, is
# missing; 1 if compiling fails.
set -euo pipefail
cd "$(dirname "$0")/.."

nvcc="${NVCC:-$(command -v nvcc || true)}"
if [[ -z "$nvcc" ]]; then
  echo "skipped: no nvcc"
  exit 0
fi
python="${PYTHON:-python3}"
if ! torch_include="$("$python" -c \
    'import os, torch; print(os.path.join(os.path.dirname(torch.__file__), "include"))' \
    2>/dev/null)"; then
  echo "error: $python cannot import torch; set PYTHON" >&2
  exit 1
fi
out="$(mktemp -d)"
trap 'rm -rf "$out"' EXIT

architectures=()
for arch in 80 90a 100; do
  if "$nvcc" --list-gpu-arch | grep -qx "compute_${arch%a}"; then
    architectures+=("$arch")
  else
    echo "skipped: sm_$arch, which this nvcc does not know"
  fi
done

for source in csrc/*.cu; do
  name="$(basename "$source" .cu)"
  for arch in "${architectures[@]}"; do
    "$nvcc" -c "$source" -o "$out/${name}_$arch.o" \
      -gencode "arch=compute_$arch,code=sm_$arch" -std=c++20 -O3 \
      -Icsrc/include -isystem "$torch_include" \
      -DUSE_CUDA -DKVP_WITH_CUDA -DTORCH_TARGET_VERSION=0x020b000000000000ULL \
      -Xcompiler -Wall,-Wextra,-fPIC --Werror all-warnings
    echo "ok: $name sm_$arch ($(stat -c %s "$out/${name}_$arch.o") bytes)"
  done
done
