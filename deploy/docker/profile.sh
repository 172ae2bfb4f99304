# shellcheck shell=sh
export PATH="/opt/venv/bin:${PATH}"
