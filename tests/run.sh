#!/usr/bin/env bash
# Makes .venv if it is missing, installs what the tests need, runs them: bash tests/run.sh [pytest arguments]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. cluster/venv.sh
ensure_venv dev
[ $# -gt 0 ] || set -- -m "not slow"
exec .venv/bin/python -m pytest "$@" </dev/null
