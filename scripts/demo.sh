#!/usr/bin/env bash
# Sets up everything on a bare machine with Python >= 3.11, then runs the main job: SFT and RL of a small policy that
# reads pictures by writing Python. Arguments go to `pyvision demo`; `scripts/demo.sh --help` lists them.
# Runs on the CPU unless JAX_PLATFORMS says otherwise (JAX_PLATFORMS=cuda after `pip install -e .[cuda]`).
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/setup.sh ""

export JAX_PLATFORMS="${JAX_PLATFORMS:-cpu}"
exec "$PY" -m pyvision_jax.cli demo "$@"
