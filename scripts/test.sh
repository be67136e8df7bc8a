#!/usr/bin/env bash
# Sets up everything on a bare machine with Python >= 3.11, then lints, type-checks and runs the CPU tests.
#   scripts/test.sh                          all of it
#   scripts/test.sh tests/test_config.py     arguments go to pytest; `-k NAME`, `-x`, ... too
#   PYVISION_TEST_DATA=DIR scripts/test.sh   also runs the tests on published data found there
# The exit code is that of the first part that failed; pytest's summary is the last line printed.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/setup.sh dev,torch,sandbox,serve,bench

export JAX_PLATFORMS=cpu
status=0
part() {
  if ! "$@"; then
    echo "FAILED: $*" >&2
    status=1
  fi
}
part "$PY" -m ruff check .
part "$PY" -m ruff format --check .
part "$PY" -m pyright
"$PY" -m pytest -m "not gpu and not slow" "$@" || status=$?
exit $status
