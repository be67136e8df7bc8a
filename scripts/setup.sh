# Sourced by the other scripts: `. scripts/setup.sh EXTRAS` from the repository root, with EXTRAS such as "dev,torch" or "".
# Makes .venv, installs this package editable with the extras, and sets PY to the environment's Python.
# A stamp holds what was installed from which pyproject.toml, so a second call costs milliseconds.
#
# PYTHON=...          interpreter to build the environment with (default: the first that is 3.11 or newer)
# PYVISION_VENV=...   folder of the environment (default: .venv)

_extras="${1-}"
_venv="${PYVISION_VENV:-.venv}"

_usable() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

_find_python() {
  local name
  for name in ${PYTHON:+"$PYTHON"} python3.11 python3 python3.12 python3.13; do
    if _usable "$name"; then
      command -v "$name"
      return 0
    fi
  done
  echo "setup: no Python 3.11 or newer found; install one or name it with PYTHON=/path/to/python" >&2
  return 1
}

_make_venv() {
  local python
  python="$(_find_python)" || return 1
  if ! "$python" -c 'import ensurepip, venv' >/dev/null 2>&1; then
    # Debian and Ubuntu ship the standard library's venv module as a package of its own.
    if command -v apt-get >/dev/null 2>&1 && [ "$(id -u)" = 0 ]; then
      local version
      version="$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')"
      { apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y "python$version-venv"; } >&2 || return 1
    else
      echo "setup: $python has no venv module; install it (Debian, Ubuntu: apt-get install python3-venv)" >&2
      return 1
    fi
  fi
  echo "setup: environment $_venv from $python" >&2
  "$python" -m venv "$_venv"
}

_install() {
  local have want stamp
  stamp="$_venv/.pyvision-stamp"
  # An environment that holds more extras than asked for is fine: `demo` after `test` installs nothing.
  want="$({ cat pyproject.toml; "$PY" -V; pwd; } | sha256sum | cut -d' ' -f1)"
  have="$(cat "$stamp" 2>/dev/null || true)"
  if [ "${have%% *}" = "$want" ]; then
    local extra missing=""
    for extra in ${_extras//,/ }; do
      case ",${have#* }," in *",$extra,"*) ;; *) missing=1 ;; esac
    done
    [ -z "$missing" ] && return 0
    _extras="$(printf '%s\n' ${have#* } ${_extras//,/ } | tr ',' '\n' | grep -v '^none$' | sort -u | paste -sd, -)"
  fi
  echo "setup: installing pyvision-jax${_extras:+[$_extras]} into $_venv (minutes the first time)" >&2
  "$PY" -m pip install --disable-pip-version-check -qq -e ".${_extras:+[$_extras]}" >&2 || return 1
  echo "$want ${_extras:-none}" >"$stamp"
}

PY="$PWD/$_venv/bin/python"
case "$_venv" in /*) PY="$_venv/bin/python" ;; esac
_usable "$PY" || _make_venv || exit 1
_install || { echo "setup: installation failed" >&2; exit 1; }

# Compiled programs are kept between runs; a folder that is missing or old only costs the compilation again.
export JAX_COMPILATION_CACHE_DIR="${JAX_COMPILATION_CACHE_DIR:-$PWD/.cache/jax}"
export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="${JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS:-0.5}"
