#!/usr/bin/env bash
# Tests on a GPU host without network, on the host's own Python, from a copy of this repository.
#   scripts/test_gpu.sh WHEELS [PYTEST ARGUMENTS ...]     WHEELS: the folder that scripts/wheels.sh filled
# Puts the wheels over the host's packages (in a temporary folder; the host stays as it is), names every requirement that
# is missing and stops with exit code 3, then runs the CPU suite and the tests marked `gpu`, which fail without a GPU.
#   PYTHON=python3      the interpreter
#   PARTS="cpu gpu"     which of the two runs
set -euo pipefail
cd "$(dirname "$0")/.."

if [ $# -lt 1 ] || [ ! -d "$1" ]; then
  echo "usage: scripts/test_gpu.sh WHEELS [pytest arguments]; WHEELS is a folder of wheels (scripts/wheels.sh)" >&2
  exit 2
fi
wheels="$(cd "$1" && pwd)"
shift
python="${PYTHON:-python3}"
temporary="$(mktemp -d)"
trap 'rm -rf "$temporary"' EXIT
site="$temporary/site-packages" # by this ending the sandbox knows folders that its sessions import from
mkdir "$site"

if compgen -G "$wheels/*.whl" >/dev/null; then
  "$python" -m pip install -q --disable-pip-version-check --no-cache-dir --no-index --no-deps --target "$site" "$wheels"/*.whl
else
  echo "test_gpu: no wheels in $wheels: the host's packages alone" >&2
fi
export PYTHONPATH="$site:$PWD:$PWD/sandbox${PYTHONPATH:+:$PYTHONPATH}"
export HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
export JAX_COMPILATION_CACHE_DIR="${JAX_COMPILATION_CACHE_DIR:-$PWD/.cache/jax-gpu-host}"

echo "requirements on $("$python" -V):"
JAX_PLATFORMS=cpu "$python" scripts/check_requirements.py torch dev || exit 3

cpu=skipped gpu=skipped
for part in ${PARTS:-cpu gpu}; do
  code=0
  case "$part" in
    cpu)
      echo "== CPU suite"
      JAX_PLATFORMS=cpu "$python" -m pytest -m "not gpu and not slow" "$@" || code=$?
      cpu=$code ;;
    gpu)
      echo "== GPU tests"
      env -u JAX_PLATFORMS PYVISION_REQUIRE_GPU=1 "$python" -m pytest -m gpu "$@" || code=$?
      [ "$code" != 5 ] || echo "test_gpu: no test is marked gpu" >&2
      gpu=$code ;;
    *)
      echo "test_gpu: unknown part $part" >&2
      exit 2 ;;
  esac
done
echo "exit codes of pytest: CPU suite $cpu, GPU tests $gpu"
case "$cpu$gpu" in *[1-9]*) exit 1 ;; esac
