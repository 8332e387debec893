#!/usr/bin/env bash
# Builds and runs the C++ tests with AddressSanitizer and UBSan, and those of
# concurrency and of CUDA kernels, emulated, with ThreadSanitizer.
#
# Usage: scripts/check_sanitizers.sh          (CXX=... names the compiler)
# Exits non-zero on a failed test, a finding, or a compiler warning. Says "skipped"
# where ThreadSanitizer cannot run.
set -euo pipefail
cd "$(dirname "$0")/.."

build="$(mktemp -d)"
trap 'rm -rf "$build"' EXIT

configure() { # configure SANITIZERS
  # Debug: -O0 keeps every access where the source has it. Without OpenMP, whose
  # runtime the sanitizers do not know.
  mkdir "$build/$1"
  cmake -S . -B "$build/$1" -DCMAKE_BUILD_TYPE=Debug -DKVP_EXTENSION=OFF \
    -DKVP_TESTS=ON -DKVP_OPENMP=OFF -DKVP_WERROR=ON \
    -DKVP_SANITIZE="$1" >"$build/configure.log" \
    || { cat "$build/configure.log"; exit 1; }
}

configure address,undefined
cmake --build "$build/address,undefined" --parallel 2
ctest --test-dir "$build/address,undefined" --output-on-failure
echo "ok: address and undefined-behaviour sanitizers"

configure thread
cmake --build "$build/thread" --target test_threads cuda_tests --parallel 2
# ThreadSanitizer needs fixed ranges of addresses. Where the kernel spreads a
# program further (vm.mmap_rnd_bits above 28) it dies before main, now and then or
# always; without address space randomisation it does not.
fixed=()
if setarch "$(uname -m)" -R true 2>/dev/null; then
  fixed=(setarch "$(uname -m)" -R)
fi
echo 'int main() { return 0; }' >"$build/empty.cpp"
"${CXX:-c++}" -fsanitize=thread "$build/empty.cpp" -o "$build/empty"
for _ in {1..10}; do
  if ! "${fixed[@]}" "$build/empty" 2>"$build/empty.log"; then
    cat "$build/empty.log"
    echo "skipped: thread sanitizer, under which even an empty program fails here" \
      "(see vm.mmap_rnd_bits and setarch -R)"
    exit 0
  fi
done
"${fixed[@]}" ctest --test-dir "$build/thread" -R '^(threads|cuda_.*)$' \
  --output-on-failure
for race in shared blocks; do # kernels that race, to see that races are seen
  if "${fixed[@]}" "$build/thread/test_cuda_emulation" "$race" 2>"$build/race.log" \
    || ! grep -q "data race" "$build/race.log"; then
    echo "error: thread sanitizer does not see a CUDA kernel race (\"$race\")" >&2
    exit 1
  fi
done
echo "ok: thread sanitizer"
