"""What an engine tells every router once, over vLLM's own channel, before it serves.

Which engines there are is vLLM's to know. Where they tell their load, and whether each
was started with options that fit the others', they say themselves: on several hosts no
router could know either.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from vllm_calrouter.keys import Keys
from vllm_calrouter.options import OptionError, RouterOptions

#: The utility by which routers ask.
UTILITY = "calrouter_introduction"

#: Options of engines that must be the same wherever engines and routers run.
SHARED = (
    "prefill",
    "order",
    "decode_order",
    "patience",
    "kv_load_failure",
    "prefill_max_num_seqs",
    "prefill_max_num_batched_tokens",
    "decode_max_num_seqs",
    "decode_max_num_batched_tokens",
)

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_TIME_NAMESPACE = "/proc/self/ns/time"


class Introduction(msgspec.Struct, frozen=True):
    """One engine's.

    Attributes:
        rank: its data-parallel rank.
        host: the address of its host, as vLLM knows it (`VLLM_HOST_IP`).
        url: where it tells its load; None: nowhere.
        keys: public keys of its pair and of the routers it admits; None: whoever comes.
        clock: name of its monotonic clock (`clock_name`).
        options: those of `SHARED`.
    """

    rank: int
    host: str
    url: str | None
    keys: tuple[str, str] | None
    clock: str
    options: dict[str, Any]


def shared_options(options: RouterOptions) -> dict[str, Any]:
    """What engines and routers must have been told alike."""
    return {name: getattr(options, name) for name in SHARED}


def public_keys(keys: Keys | None) -> tuple[str, str] | None:
    """An engine's own public key and the one it admits; neither is secret."""
    return (keys.public.decode(), keys.other.decode()) if keys else None


def clock_name() -> str:
    """A name that processes share exactly when `time.monotonic` is the same to them.

    Linux counts it from boot, and a time namespace may shift it (time_namespaces(7)).
    """
    name = ""
    with suppress(OSError):
        name = _BOOT.read_text().strip()
    with suppress(OSError):
        name += " " + os.readlink(_TIME_NAMESPACE)
    # Nothing known: no two are taken to be the same.
    return name or os.urandom(16).hex()


def read(told: Sequence[Any]) -> list[Introduction]:
    """Introductions as utilities return them, by rank."""
    return sorted(
        msgspec.convert(list(told), list[Introduction]), key=lambda one: one.rank
    )


def check(
    engines: Sequence[Introduction], options: RouterOptions, keys: Keys | None
) -> None:
    """Check that all engines were started to work with this router.

    Args:
        engines: by rank.
        options: the router's.
        keys: the router's, None without.

    Raises:
        OptionError: names the engine, its host, and what differs.
    """
    ours = shared_options(options)
    expected = (keys.other.decode(), keys.public.decode()) if keys else None
    for engine in engines:
        for name, value in ours.items():
            if (theirs := engine.options.get(name)) != value:
                raise _differs(engine, name, theirs, value)
        if (engine.url is None) != (options.telemetry == "off"):
            theirs = "off" if engine.url is None else engine.url
            raise _differs(engine, "telemetry", theirs, options.telemetry)
        if engine.url is not None and engine.keys != expected:
            raise OptionError(
                f"engine {engine.rank} on {engine.host} has other telemetry keys than "
                "this router: start every host with copies of one folder of keys "
                "(--router-config.telemetry_keys)"
            )


def _differs(engine: Introduction, name: str, theirs: Any, ours: Any) -> OptionError:
    return OptionError(
        f"engine {engine.rank} on {engine.host} was started with {name} {theirs}, this "
        f"router with {ours}: write the same --router-config on every host"
    )
