#!/usr/bin/env bash
# Builds the core's own tests with warnings as errors and both sanitizers; runs them.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
"${CXX:-g++}" -std=c++17 -O1 -g -Wall -Wextra -Werror \
  -fsanitize=address,undefined -fno-sanitize-recover=all \
  "$here/test_core.cpp" -o "$out/test_core"
"$out/test_core"
