#!/usr/bin/env bash
# Makes the Python environment .venv in the repository root: launch/env.sh [EXTRA ...]
# EXTRA is one of setup.py's: cpu (default), gpu, dev, bench. `launch/env.sh sglang` makes .venv-sglang instead, the
# environment of the engine's own process, which needs other versions of torch and transformers.
#
# Does nothing when all is in place; installs again when setup.py, constraints.txt or this file changed; starts over
# after an install that was killed. Two at once wait for each other. Prints the PATH to run with, and nothing else:
#
#   export PATH="$(launch/env.sh cpu)"
#
#   PYTHON              interpreter to use; default: python3.11, else python3.12
#   TREEOPSD_PIP_ARGS   more words for every pip install, for instance a place that has a CPU build of torch:
#                       "--extra-index-url URL" or "--find-links FOLDER"
#   TREEOPSD_INSTALL    0: install nothing and use the environment that is active (in a container image)
set -euo pipefail

if [[ "${TREEOPSD_INSTALL:-1}" == 0 ]]; then
    echo "$PATH"
    exit 0
fi
[[ $# -gt 0 ]] || set -- cpu
root="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)"
venv="$root/.venv"
made="$venv/.made"             # where this script made the environment, and of which Python
unfinished="$venv/.unfinished" # there while an install runs; left behind by one that was killed
constraints="$root/constraints.txt"
sources=("$root/setup.py" "$constraints")
if [[ "$*" == sglang ]]; then
    venv="$root/.venv-sglang" made="$root/.venv-sglang/.made" unfinished="$root/.venv-sglang/.unfinished"
    constraints="$root/launch/sglang_cpu/requirements.txt"
    sources=("$constraints")
fi
wanted="$(cat "${sources[@]}" "$root/launch/env.sh" | sha256sum)"

finish() {
    echo "$venv/bin:$PATH"
    exit 0
}

fail() {
    printf 'env.sh: %s\n' "$@" >&2
    exit 1
}

version_of() { # PYTHON. Runs it: the shim of a version manager exists, and refuses
    "$1" -c 'import sys; print("Python %d.%d" % sys.version_info[:2])' 2>/dev/null || true
}

find_python() {
    local candidate
    for candidate in ${PYTHON:+"$PYTHON"} python3.11 python3.12 python3; do
        if [[ "$(version_of "$candidate")" =~ ^Python\ 3\.1[12]$ ]]; then
            printf '%s' "$candidate"
            return
        fi
        [[ -z "${PYTHON:-}" ]] || fail "PYTHON=$PYTHON is not a Python 3.11 or 3.12 that runs."
    done
    fail "needs Python 3.11 or 3.12 and found no python3.11 or python3.12 on PATH." \
        "Install one, or set PYTHON to its path."
}

usable() { # true if .venv is ours, whole, made here (scripts in it name its folder) and of the Python asked for
    [[ -x "$venv/bin/python" && ! -e "$unfinished" && -e "$made" ]] &&
        [[ "$(head -n 1 "$made")" == "$venv" ]] &&
        [[ -z "${PYTHON:-}" || "$(version_of "$PYTHON")" == "$(tail -n 1 "$made")" ]]
}

installed() { # EXTRA ...
    local extra
    usable || return 1
    for extra in "$@"; do
        [[ "$(cat "$venv/.installed-$extra" 2>/dev/null)" == "$wanted" ]] || return 1
    done
}

make_venv() {
    local python
    python="$(find_python)" || exit 1
    touch "$unfinished"
    find "$venv" -mindepth 1 -maxdepth 1 ! -name .lock ! -name .unfinished -exec rm -rf -- {} +
    printf '%s\n%s\n' "$venv" "$(version_of "$python")" >"$made"
    "$python" -m venv "$venv" >&2 || fail "$python cannot make a virtual environment (see above)." \
        "On Debian and Ubuntu its venv module is a package of its own: apt-get install python3-venv."
}

pip_install() {
    local -a more=()
    read -r -a more <<<"${TREEOPSD_PIP_ARGS:-}"
    if ! "$venv/bin/python" -m pip install --quiet --disable-pip-version-check \
        --constraint "$constraints" ${more[@]+"${more[@]}"} "$@" >&2; then
        rm -f -- "$unfinished" # pip gave up by itself: what is installed is whole, and the next start goes on from it
        fail "pip could not install $* (see above)." \
            "Without a package index in reach, point TREEOPSD_PIP_ARGS to a folder of wheels:" \
            "TREEOPSD_PIP_ARGS='--no-index --find-links FOLDER'"
    fi
}

install_training() { # EXTRA ...
    local extras
    # torch first and alone, or another package may pull in a build for hardware that is not there. megatron-core's
    # metadata asks for Python 3.12, but its wheel for 3.11 works.
    pip_install "$(grep '^torch==' "$constraints")"
    pip_install --no-deps --ignore-requires-python "$(grep '^megatron-core==' "$constraints")"
    extras="$(IFS=, && echo "$*")"
    pip_install --editable "${root}[$extras]"
}

install_sglang() {
    if nvidia-smi -L >/dev/null 2>&1; then
        constraints=/dev/null # its own metadata pins what it runs with on a GPU
        pip_install "$(grep '^sglang==' "$root/launch/sglang_cpu/requirements.txt")"
    else # what its metadata asks for does not install without CUDA; the list is complete
        pip_install "$(grep '^torch==' "$constraints")"
        pip_install --no-deps --requirement "$constraints"
    fi
}

for extra in "$@"; do
    [[ "$extra" =~ ^(cpu|gpu|dev|bench)$ || "$*" == sglang ]] ||
        fail "unknown extra $extra; known: cpu, gpu, dev, bench; and sglang, alone"
done
! installed "$@" || finish
command -v flock >/dev/null || fail "needs the command flock (package util-linux), which keeps two installs apart."
[[ -e "$made" || ! -e "$venv/pyvenv.cfg" ]] || fail "$venv is there, but this script did not make it." \
    "Move it away, or activate it, install this package into it and set TREEOPSD_INSTALL=0."
mkdir -p -- "$venv"
exec 9>"$venv/.lock"
flock --nonblock 9 || {
    echo "env.sh: another start is installing; waiting for it" >&2
    flock 9
}
! installed "$@" || finish # the other one did it

usable || make_venv
echo "env.sh: installing $* into $venv (minutes the first time)" >&2
touch "$unfinished"
if [[ "$*" == sglang ]]; then install_sglang; else install_training "$@"; fi
for extra in "$@"; do printf '%s\n' "$wanted" >"$venv/.installed-$extra"; done
rm -f -- "$unfinished"
finish
