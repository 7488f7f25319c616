#!/usr/bin/env bash
# Installs, starts a private Ray head, trains a small model twice (once with a worker killed), shows the receipt,
# and simulates what the measured costs mean on a cluster.
# Needs Python 3.11, git and a C++ compiler. Leaves every other Ray cluster of this machine alone.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. cluster/venv.sh
ensure_venv ray,app,sim
# exec: signals reach the program itself, which stops the head that it started.
exec .venv/bin/python -m cluster.quickstart "$@"
