# Sourced by quickstart.sh and tests/run.sh: makes .venv and installs what is missing.
# ensure_venv EXTRAS: a stamp with the hash of pyproject.toml says what is installed; nothing is done twice.

find_python() {
    local name
    for name in "${PYTHON:-}" python3.11 python3.12 python3.13 python3 python; do
        if [ -n "$name" ] && command -v "$name" >/dev/null 2>&1 &&
            "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$name"
            return
        fi
    done
    echo "error: Python 3.11 or newer is needed (set PYTHON=/path/to/python)" >&2
    return 1
}

# Shows the size of .venv and the last line of pip's log from time to time: a person sees that it moves.
install_quietly() {
    local log=.venv/install.log begin=$SECONDS pid shown=$SECONDS
    .venv/bin/python -m pip install --disable-pip-version-check --no-input -e ".[$1]" </dev/null >"$log" 2>&1 &
    pid=$!
    while kill -0 "$pid" 2>/dev/null; do
        sleep 1
        if [ $((SECONDS - shown)) -ge 10 ]; then
            shown=$SECONDS
            # The size too: pip says nothing for a minute while it copies thousands of files.
            printf '  %4d s  %5d MB  %s\n' $((SECONDS - begin)) "$(du -sm .venv | cut -f1)" \
                "$(grep -v WARNING "$log" | tail -n 1 | cut -c1-90)"
        fi
    done
    if ! wait "$pid"; then
        tail -n 20 "$log" >&2
        echo "error: the installation failed; all of its output is in $log" >&2
        return 1
    fi
}

ensure_venv() {
    local extras=$1 stamp=.venv/stamp wanted
    if [ ! -x .venv/bin/python ]; then
        local python
        python=$(find_python)
        echo "making .venv with $python"
        "$python" -m venv .venv
    fi
    wanted=$(.venv/bin/python -c 'import hashlib; print(hashlib.sha256(open("pyproject.toml", "rb").read()).hexdigest())')
    # An installation for developers holds everything that the others do.
    if grep -qx "$wanted $extras" "$stamp" 2>/dev/null || grep -qx "$wanted dev" "$stamp" 2>/dev/null; then
        return
    fi
    echo "installing layercheck[$extras] into .venv (a few minutes the first time)"
    install_quietly "$extras"
    echo "$wanted $extras" >"$stamp"
}
