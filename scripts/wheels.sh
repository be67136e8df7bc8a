#!/usr/bin/env bash
# Collects wheels for a GPU host without network: Python 3.12, Linux x86-64, one version of each, nothing they depend on.
#   scripts/wheels.sh [DIR]                    the packages that a host with jax, flax, optax, orbax, transformers and
#                                              the usual scientific Python lacks (default DIR: wheels)
#   scripts/wheels.sh DIR NAME[==VERSION] ...  these packages instead
# Take the folder to the host and run scripts/test_gpu.sh DIR there; it names whatever is still missing.
# PYTHON_VERSION=3.12 and LIMIT_MB=60 may be set to other values.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/setup.sh ""

out="${1:-wheels}"
[ $# -eq 0 ] || shift
limit="${LIMIT_MB:-60}"
# grain needs array-record and portpicker, tensorflow-datasets the two lines behind it; Pillow is pinned by this project
# and its resizing must be that version's.
names=("$@")
[ $# -gt 0 ] || names=(pillow==13.0.0 grain array-record portpicker omegaconf tensorboardX decord tensorflow-datasets
  dm-tree immutabledict promise simple-parsing docstring-parser tensorflow-metadata googleapis-common-protos termcolor
  toml importlib-resources)

platforms=()
for tag in manylinux_2_39 manylinux_2_35 manylinux_2_34 manylinux_2_31 manylinux_2_28 manylinux_2_27 manylinux_2_24 \
  manylinux_2_17 manylinux2014 manylinux2010 manylinux1; do
  platforms+=(--platform "${tag}_x86_64")
done

mkdir -p "$out"
rm -f "$out"/*.whl
# What this environment was tested with, where it holds the package.
versions="$("$PY" -m pip list --format=freeze 2>/dev/null)"
for name in "${names[@]}"; do
  case "$name" in *[=\<\>]*) ;; *)
    tested="$(grep -i -E "^${name//[-_]/[-_.]}==" <<<"$versions" | head -n 1 || true)"
    name="${tested:-$name}" ;;
  esac
  if ! "$PY" -m pip download -qq --disable-pip-version-check --no-deps --only-binary=:all: \
    --python-version "${PYTHON_VERSION:-3.12}" --implementation cp "${platforms[@]}" -d "$out" "$name" 2>"$out/.errors"; then
    # Some packages are published as source alone; pure Python gives a wheel that fits every host.
    "$PY" -m pip wheel -qq --disable-pip-version-check --no-deps -w "$out" "$name"
    if ! compgen -G "$out/$(sed 's/[=<>].*//; s/-/_/g' <<<"$name")-*-none-any.whl" >/dev/null; then
      cat "$out/.errors" >&2
      exit 1
    fi
  fi
done
rm -f "$out/.errors"

twice="$(cd "$out" && ls -- *.whl | sed 's/-.*//' | tr 'A-Z' 'a-z' | sort | uniq -d)"
if [ -n "$twice" ]; then
  echo "wheels: more than one version of: $twice" >&2
  exit 1
fi
(cd "$out" && du -b -- *.whl | awk '{printf "%8.2f MiB  %s\n", $1 / 1048576, $2}')
bytes="$(cat "$out"/*.whl | wc -c)"
awk -v b="$bytes" -v n="$(ls "$out"/*.whl | wc -l)" -v d="$out" 'BEGIN {printf "%8.2f MiB  in %d wheels in %s\n", b / 1048576, n, d}'
if [ "$bytes" -gt $((limit * 1048576)) ]; then
  echo "wheels: more than $limit MiB" >&2
  exit 1
fi
