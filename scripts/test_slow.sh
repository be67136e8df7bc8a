#!/usr/bin/env bash
# The tests that take minutes each (marker `slow`), on the CPU. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/setup.sh dev,torch,sandbox,serve,bench

export JAX_PLATFORMS=cpu
exec "$PY" -m pytest -m "slow and not gpu" "$@"
