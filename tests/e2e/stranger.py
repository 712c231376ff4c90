"""What somebody without keys gets who stands next to an engine, and does to it.

    python -m tests.e2e.stranger URL KEYS

listens to an engine's telemetry with the routers' keys, with no keys, and with keys of
its own (it knows the engine's public one), and sends rubbish, until the first ear has
heard enough. Prints how many messages each ear heard.
"""

from __future__ import annotations

import argparse
import json
import socket
import time
from pathlib import Path
from urllib.parse import urlsplit

import zmq

from vllm_calrouter.keys import Keys, load_keys

ENOUGH = 30

#: A failing test's time.
PATIENCE_S = 30.0


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("keys", type=Path)
    args = parser.parse_args()
    ours = load_keys(args.keys, "router")
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    ears = {
        "router": listen(context, args.url, ours),
        "no keys": listen(context, args.url, None),
        "own keys": listen(context, args.url, Keys(*zmq.curve_keypair(), ours.other)),
    }
    heard = dict.fromkeys(ears, 0)
    deadline_s = time.monotonic() + PATIENCE_S
    while heard["router"] < ENOUGH and time.monotonic() < deadline_s:
        send_rubbish(args.url)
        ears["no keys"].send(b"\x01rubbish")
        for name, ear in ears.items():
            while ear.poll(10):
                ear.recv()
                heard[name] += 1
    context.destroy(linger=0)
    print(json.dumps(heard))


def listen(
    context: zmq.Context[zmq.Socket[bytes]], url: str, keys: Keys | None
) -> zmq.Socket[bytes]:
    ear = context.socket(zmq.XSUB)
    ear.setsockopt(zmq.SNDTIMEO, 0)
    if keys is not None:
        keys.use(ear, "router")
    ear.connect(url)
    ear.send(b"\x01")
    return ear


def send_rubbish(url: str) -> None:
    place = urlsplit(url)
    assert place.hostname is not None
    assert place.port is not None
    with socket.create_connection((place.hostname, place.port), PATIENCE_S) as line:
        line.sendall(bytes(range(256)) * 64)


if __name__ == "__main__":
    main()
