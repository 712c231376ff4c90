#!/usr/bin/env bash
# Test against another release of vLLM, also one that exists for GPUs only:
#
#     bash tests/cpu/test-vllm.sh 0.33.0
#
# All but tests/e2e runs there: those need a model's kernels, tests/release does not.
# The release is installed into .cache and found before the environment's own, which
# stays as it is.
set -euo pipefail
cd "$(dirname "$0")/../.."

version=${1:?say which: bash tests/cpu/test-vllm.sh 0.33.0}
[[ $version =~ ^[0-9]+(\.[0-9]+)+((rc|\.post)[0-9]+)?$ ]] ||
  { echo "test-vllm: $version is not a version"; exit 2; }

python=$PWD/.venv/bin/python
folder=$PWD/.cache/vllm-$version
extras=tests/cpu/requirements-${version%.*}.txt

say() { echo "test-vllm: $*"; }

pip_into() {
  "$python" -m pip install --quiet --disable-pip-version-check --no-deps --upgrade \
    --target "$@"
}

# vLLM chooses its CPU platform by the version that its metadata tell.
call_it_cpu() {
  local found=$1/vllm-$version.dist-info
  sed -i "0,/^Version: .*/s//Version: $version+cpu/" "$found/METADATA"
  mv "$found" "$1/vllm-$version+cpu.dist-info"
}

install_release() {
  [[ -d $folder ]] && return
  say "installing vllm $version into ${folder#"$PWD"/}"
  # Under another name until complete: what is cut off is not taken for a whole.
  local partial=$folder.partial
  rm -rf "$partial"
  pip_into "$partial" "vllm==$version"
  call_it_cpu "$partial"
  mv "$partial" "$folder"
}

install_extras() {
  if [[ ! -f $extras ]] || cmp -s "$extras" "$folder/extras.txt"; then return; fi
  say "installing what $extras lists"
  pip_into "$folder" -r "$extras"
  cp "$extras" "$folder/extras.txt"
}

check_import() {
  local code='import vllm; print(f"\n{vllm.__version__} {vllm.__file__}")'
  local imported
  imported=$("$python" -c "$code" | tail -n 1)
  say "imported: vllm $imported"
  [[ $imported == "$version $folder/"* ]] ||
    { say "that is not vllm $version of ${folder#"$PWD"/}"; exit 1; }
}

install_release
install_extras
export PYTHONPATH=$folder${PYTHONPATH:+:$PYTHONPATH}
check_import
"$python" -m pytest tests --ignore=tests/e2e
