#!/usr/bin/env bash
# Makes a virtual environment from the locks: scripts/setup.sh VENV [dev]
# PYTHON: the interpreter (default python3.11). NIGHTSHIFT_PIP_ARGS: further arguments of each pip install.
set -euo pipefail
venv=${1:?usage: scripts/setup.sh VENV [dev]}
part=${2:-cpu}
python=${PYTHON:-python3.11}
root=$(cd "$(dirname "$0")/.." && pwd)
read -r -a pip_args <<<"${NIGHTSHIFT_PIP_ARGS:-}"

torch_hint="the CPU build of torch that requirements/cpu.txt names was not found. Pass the PyTorch project's CPU \
wheel index: make venv PIP_ARGS=\"--extra-index-url URL\", or NIGHTSHIFT_PIP_ARGS in the environment."

fail() {
  printf 'setup: %s\n' "$*" >&2
  exit 2
}

require() {
  case "$(uname -sm)" in
    "Linux x86_64") ;;
    *) fail "the locks are for Linux on x86-64, this is $(uname -sm)" ;;
  esac
  command -v "$python" >/dev/null ||
    fail "$python is missing: install Python 3.11 with its venv module and headers (Debian: python3.11-venv, python3.11-dev), or set PYTHON"
  "$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' ||
    fail "the locks are for Python 3.11, $python is $("$python" -V 2>&1); set PYTHON"
  "$python" -c 'import ensurepip, venv' 2>/dev/null ||
    fail "$python has no venv module: install it (Debian: python3.11-venv)"
  "$python" - <<'PY' || fail "Python's headers are missing, DeepSpeed compiles an extension: install them (Debian: python3.11-dev)"
import pathlib, sys, sysconfig
sys.exit(not pathlib.Path(sysconfig.get_path("include"), "Python.h").exists())
PY
  command -v g++ >/dev/null || fail "g++ is missing, DeepSpeed compiles an extension: install it (Debian: g++)"
}

install() {
  "$venv/bin/python" -m pip install --disable-pip-version-check -qq --no-deps --no-compile \
    ${pip_args[@]+"${pip_args[@]}"} "$@"
}

compile() {
  # With all cores, where pip uses one. Some packages hold files for another Python, which pip passes over too.
  local packages
  packages=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  "$venv/bin/python" -m compileall -qq -j 0 "$packages" || true
}

install_torch() {
  # First and alone: where the index has no CPU build, nothing else has been downloaded yet.
  local pin
  pin=$(grep -E '^torch==' "$root/requirements/cpu.txt")
  install "$pin" || fail "$torch_hint"
  "$venv/bin/python" - <<'PY' || fail "$torch_hint"
import importlib.metadata, sys
sys.exit("+cpu" not in importlib.metadata.version("torch"))
PY
}

main() {
  require
  [ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
  install_torch
  install -r "$root/requirements/cpu.txt"
  install -r "$root/requirements/cpu-hashed.txt"
  [ "$part" != dev ] || install -r "$root/requirements/dev.txt"
  install --no-build-isolation -e "$root"
  compile
  "$venv/bin/python" "$root/scripts/lock.py" --check "$part"
}

main
