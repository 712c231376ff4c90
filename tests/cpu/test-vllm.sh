#!/usr/bin/env bash
# Runs what needs no compiled kernels against another vLLM release, beside .venv.
#
#   tests/cpu/test-vllm.sh 0.33.0
#
# Releases for CUDA import on a machine without a GPU once their version says "+cpu",
# which is how vLLM recognises a CPU build; their kernels do not load.
set -euo pipefail
version=${1:?say which release, for example 0.33.0}
cd "$(dirname "$0")/../.."
python=.venv/bin/python
place=.cache/vllm-$version

if [ ! -e "$place/.complete" ]; then
  echo "test-vllm: installing vllm $version into $place"
  rm -rf "$place"
  # The wheel is one of CUDA kernels; of what it depends on .venv has what is needed.
  $python -m pip install --quiet --no-deps --target "$place" "vllm==$version"
  mv "$place/vllm-$version.dist-info" "$place/vllm-$version+cpu.dist-info"
  sed -i "s/^Version: .*/Version: $version+cpu/" \
    "$place/vllm-$version+cpu.dist-info/METADATA"
  touch "$place/.complete"
fi

export PYTHONPATH="$PWD/$place:$PWD"
$python - "$version" <<'PYTHON'
import sys
from importlib.metadata import version
import vllm

wanted = f"{sys.argv[1]}+cpu"
print(f"test-vllm: vllm {version('vllm')} from {vllm.__file__}")
sys.exit(0 if version("vllm") == wanted else f"wanted {wanted}")
PYTHON
exec $python -m pytest -m "not e2e or kernel_free" "${@:2}"
