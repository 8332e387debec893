#!/usr/bin/env bash
# Builds and runs the C++ tests with AddressSanitizer and UBSan.
#
# Usage: scripts/check_sanitizers.sh          (CXX=... names the compiler)
# Exits non-zero on a failed test, a finding, or a compiler warning.
set -euo pipefail
cd "$(dirname "$0")/.."

build="$(mktemp -d)"
trap 'rm -rf "$build"' EXIT
# Debug: -O0 keeps every access where the source has it. Without OpenMP, whose
# runtime the sanitizers do not know.
cmake -S . -B "$build" -DCMAKE_BUILD_TYPE=Debug -DKVP_EXTENSION=OFF \
  -DKVP_TESTS=ON -DKVP_OPENMP=OFF -DKVP_WERROR=ON \
  -DKVP_SANITIZE=address,undefined >"$build/configure.log" \
  || { cat "$build/configure.log"; exit 1; }
cmake --build "$build"
ctest --test-dir "$build" --output-on-failure
echo "ok: address and undefined-behaviour sanitizers"
