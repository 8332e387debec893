#!/usr/bin/env bash
# Runs a command while the C++ part of this project compiles; _setup.sh calls it.
#
#   bash _beside_build.sh PYTHON BUILD_DIR COMMAND...
#
# PYTHON has torch. The exit code is that of COMMAND. A build that fails is not reported
# here: the installation of the project builds again, and says why.
set -u
python="$1" build_dir="$2"
shift 2

compile() {
  local root arguments=()
  root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
  read -r -a arguments <<<"${CMAKE_ARGS:-}"
  # As setup.py does it. Only the folder of the result differs, which changes no object.
  cmake -S "$root" -B "$build_dir" -DPython_EXECUTABLE="$python" \
    -DKVP_OUTPUT_DIR="$build_dir" -DKVP_CUDA="${KVP_CUDA:-AUTO}" "${arguments[@]}" &&
    cmake --build "$build_dir" --parallel "$(nproc)"
}

trap 'exit 143' TERM # at once, not after COMMAND; _setup.sh ends the rest
mkdir -p "$build_dir"
compile >"$build_dir/beside.log" 2>&1 &
"$@" &
code=0
wait $! || code=$?
wait
exit "$code"
