#!/usr/bin/env bash
# Prefill on this machine, decode on another: run it on both, `head` first.
#
#   HEAD=10.0.0.1 ./two_machines.sh head    # on 10.0.0.1: HTTP on port 8000, prefill
#   HEAD=10.0.0.1 ./two_machines.sh other   # on the other: decode
#
# Before that, once: make keys and copy the folder to the other machine, for your user
# only (an engine's machine needs engine.key_secret and router.key, not the other two).
#
#   python -m vllm_calrouter.keys keys
#   ssh OTHER mkdir -m 700 keys
#   scp -p keys/engine.key_secret keys/router.key OTHER:keys/
set -euo pipefail

: "${HEAD:?the address of the machine with the API server}"
MODEL=${MODEL:-Qwen/Qwen2.5-3B-Instruct}
# Engines on each machine, one a GPU.
EACH=${EACH:-1}

# This machine's address on the network that the two share. vLLM guesses it; say it where
# there are several.
export VLLM_HOST_IP=${VLLM_HOST_IP:-$(ip -json route get "$HEAD" |
    python3 -c 'import json, sys; print(json.load(sys.stdin)[0]["prefsrc"])')}
# Where decode engines ask for KV caches. vLLM's default is localhost.
export VLLM_NIXL_SIDE_CHANNEL_HOST=$VLLM_HOST_IP

# The same on both machines.
common=(
    --data-parallel-size "$((2 * EACH))" --data-parallel-size-local "$EACH"
    --data-parallel-address "$HEAD" --data-parallel-rpc-port 29550
    --kv-transfer-config '{"kv_connector":"NixlConnector","kv_role":"kv_both"}'
    --router-plugin calrouter
    # The first ranks are those of `head`.
    --router-config.prefill "$EACH"
    # Rank N tells its load on port 5600 + N of its own machine.
    --router-config.telemetry 'tcp://*:5600' --router-config.telemetry_keys keys
)

case ${1:-} in
head) exec vllm serve "$MODEL" "${common[@]}" "${@:2}" ;;
other)
    exec vllm serve "$MODEL" --headless --data-parallel-start-rank "$EACH" \
        "${common[@]}" "${@:2}"
    ;;
*) sed -n '2,13s/^# \{0,1\}//p' "$0" >&2 && exit 2 ;;
esac
