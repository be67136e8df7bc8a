#!/usr/bin/env bash
# Sets up everything, then runs 10,000 sandbox sessions with ordinary and hostile cells and looks for what is left of them.
# At most 10 minutes. Arguments go to the soak: `scripts/soak.sh --sessions 1000 --seed 7`.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/setup.sh ""

exec "$PY" -m pyvision_jax.bench.soak "$@"
