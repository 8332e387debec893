#!/usr/bin/env bash
# Sets everything up and runs all checks.
set -euo pipefail

usage() {
  cat <<'HELP'
Usage: bash scripts/test.sh [--all] [pytest arguments]

Sets up the same environment as serve.sh plus the test tools and the default
model, then runs the checks of .pre-commit-config.yaml (ruff, mypy, clang-format,
codespell) and pytest, which also builds and runs the C++ tests and the site of the
documentation.

  --all   the full tier. The default tier leaves out tests marked slow and whole
          engines on model runner V2, and makes random tests shorter; see
          "Two test tiers" in CONTRIBUTING.md.

With pytest arguments only pytest runs, with these:

  bash scripts/test.sh tests/unit -k snapkv

It prints the 25 slowest tests, the tier and the wall time. Results also go to
build/test-results.xml (JUnit). The exit code is pytest's,
or 1 if only another check failed. Environment: as in serve.sh --help, and

  KVP_TEST_WORKERS   test files that run at a time (default: one per core, four
                     at most)
  KVP_TEST_TIER      "all" is another way to say --all
HELP
}

# shellcheck source=scripts/_setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/_setup.sh"

if [[ "${1:-}" == -h || "${1:-}" == --help ]]; then
  usage
  exit 0
fi

# Told before anything is set up; pytest's own message is lost among its workers.
for argument in "$@"; do
  file="${argument%%::*}"
  if [[ "$file" == tests/* && ! -e "$KVP_ROOT/$file" ]]; then
    die "there is no $file"
  fi
done

on_exit() {
  local code=$?
  trap '' INT TERM HUP
  kvp_stop 20
  exit "$code"
}
trap on_exit EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
trap 'exit 129' HUP

# Also beside a GPU: most tests are of CPU kernels, or ask for a GPU by themselves.
export KVP_DEVICE="${KVP_DEVICE:-cpu}"
kvp_setup dev
kvp_default_model
cd "$KVP_ROOT"

export PATH="$KVP_VENV/bin:$PATH" PYTHON="$PY"
export KVP_TEST_MODEL="$KVP_MODEL"
# Tests use local files only; a look-up would wait for a network in vain.
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1
export TOKENIZERS_PARALLELISM=false
export VLLM_CPU_KVCACHE_SPACE="${VLLM_CPU_KVCACHE_SPACE:-1}"
# By default every vLLM process pins itself to the same first cores, which
# makes engines that run side by side crawl.
export VLLM_CPU_OMP_THREADS_BIND="${VLLM_CPU_OMP_THREADS_BIND:-nobind}"
# One thread per worker: two workers with a thread per core each wait for each other.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

tier=default
for argument in "$@"; do
  if [[ "$argument" == --all ]]; then tier=full; fi
done
if [[ "${KVP_TEST_TIER:-}" == all ]]; then tier=full; fi
if [[ "$tier" == full ]]; then kvp_install_extra full-tests; fi

SECONDS=0
lint=0
everything=""
if (($# == 0)) || { (($# == 1)) && [[ "$1" == --all ]]; }; then everything=1; fi
if [[ -n "$everything" ]]; then
  if git rev-parse --git-dir >/dev/null 2>&1; then
    say "• ruff, mypy, clang-format, codespell"
    PRE_COMMIT_HOME="$KVP_STATE/pre-commit" "$PY" -m pre_commit run --all-files || lint=1
  else
    say "• not a git checkout: ruff, mypy, clang-format and codespell are left out"
  fi
fi

checks=$SECONDS
say "• pytest, $tier tier"
code=0
cores="$(env -u OMP_NUM_THREADS nproc 2>/dev/null || echo 1)" # nproc obeys that variable
workers="${KVP_TEST_WORKERS:-$((cores < 4 ? cores : 4))}"
# Whole files, whose tests share engines; each engine has one thread. In the order of
# tests/conftest.py: those that take longest come first.
# coverage.sh sets KVP_COVERAGE.
"$PY" ${KVP_COVERAGE:+-m coverage run} -m pytest --durations=25 --junitxml=build/test-results.xml \
  -n "$workers" --dist loadfile --no-loadscope-reorder "$@" || code=$?
minutes() { printf '%d:%02d' $(($1 / 60)) $(($1 % 60)); }
say "$tier tier: $(minutes "$SECONDS") minutes after the set-up, of which" \
  "$(minutes "$checks") before pytest"
if ((code == 0 && lint)); then
  say "error: pytest passed, but a check before it failed"
  code=1
fi
exit "$code"
