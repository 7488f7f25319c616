#!/usr/bin/env bash
# Makes .venv if it is missing, installs what the tests need, runs them: bash tests/run.sh [pytest arguments]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. cluster/venv.sh
ensure_venv dev
# Two lanes: much of the time is waiting. A file stays in one lane, so that its fixtures are made once; the
# folders come in order, and with them the long tests first.
[ $# -gt 0 ] || set -- -m "not slow" --numprocesses 2 --dist loadfile --no-loadscope-reorder
exec .venv/bin/python -m pytest "$@" </dev/null
