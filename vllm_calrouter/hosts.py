"""Engines on several hosts, as vLLM starts them: which of them one launch has, and what
such a launch must say.

One `vllm serve` has the API servers and the first ranks, and on each other host
`vllm serve --headless` has the next ones.
"""

from __future__ import annotations

import ipaddress
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass

from vllm_calrouter.keys import Side
from vllm_calrouter.options import OptionError, RouterOptions

SIDE_CHANNEL_HOST = "VLLM_NIXL_SIDE_CHANNEL_HOST"

_ANY_PORT = "tcp://*:5600"


@dataclass(frozen=True)
class Launch:
    """What one `vllm serve` starts.

    Attributes:
        engines: data-parallel ranks of all launches together.
        ranks: those of this launch.
        headless: no API server, and so no router, is part of it.
        address: the API servers' host as written (`--data-parallel-address`).
    """

    engines: int
    ranks: range
    headless: bool = False
    address: str | None = None

    @property
    def is_part(self) -> bool:
        """Whether other launches have the other engines, or the API servers."""
        return self.headless or len(self.ranks) < self.engines

    @property
    def sides(self) -> tuple[Side, ...]:
        """Whose telemetry keys this launch needs."""
        if self.headless:
            return ("engine",)
        return ("engine", "router") if self.ranks else ("router",)


def launch_of(args: Namespace) -> Launch:
    """The launch that a command line asks for.

    Raises:
        OptionError: its ranks are not part of one data-parallel server of vLLM's.
    """
    engines = args.data_parallel_size
    headless = bool(getattr(args, "headless", False))
    local = getattr(args, "data_parallel_size_local", None)
    start = getattr(args, "data_parallel_start_rank", None)
    if start is not None and not headless:
        raise OptionError(
            "--data-parallel-start-rank without --headless starts a server that sees "
            "its own engines only: add --headless, or drop it on the API servers' host"
        )
    local = engines if local is None else local
    first = start or 0
    if not 0 <= first <= first + local <= engines:
        raise OptionError(
            f"ranks {first} to {first + local - 1} are not all of the {engines} "
            "engines: check --data-parallel-size, --data-parallel-size-local and "
            "--data-parallel-start-rank"
        )
    if headless and not local:
        raise OptionError(
            "--headless without an engine does nothing: "
            "write --data-parallel-size-local 1 or more"
        )
    address = getattr(args, "data_parallel_address", None)
    return Launch(engines, range(first, first + local), headless, address)


def check_part(
    launch: Launch, options: RouterOptions, environ: Mapping[str, str]
) -> None:
    """Check that this launch and those on other hosts will find each other.

    Raises:
        OptionError: what is missing is named with what to write.
    """
    if not launch.is_part:
        return
    if launch.address is None:
        raise OptionError(
            "engines on other hosts need the API servers' address: "
            "add --data-parallel-address ADDRESS, the same on every host"
        )
    # Then all launches are on one machine.
    if is_loopback(launch.address):
        return
    if launch.ranks.start < options.prefill and launch.ranks:
        _check_side_channel(environ.get(SIDE_CHANNEL_HOST))


def check_reach(launch: Launch, telemetry: str, host: str | None) -> None:
    """Check that routers on another host can reach where engines tell.

    Args:
        telemetry: the option, not `off`.
        host: the host in it, None without one.
    """
    if not launch.is_part:
        return
    far = launch.address is None or not is_loopback(launch.address)
    if host is None or (far and is_loopback(host)):
        raise OptionError(
            f"--router-config.telemetry {telemetry} does not reach engines on other "
            f"hosts: write --router-config.telemetry '{_ANY_PORT}' on every host"
        )


def is_loopback(host: str) -> bool:
    """Whether a host, as written, is a machine's name for itself."""
    host = host.strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _check_side_channel(host: str | None) -> None:
    if host and not is_loopback(host) and host not in ("0.0.0.0", "::", "*"):
        return
    raise OptionError(
        f"decode engines on other hosts read KV caches from {host or 'localhost'}: set "
        f"the environment variable {SIDE_CHANNEL_HOST} to this host's address"
    )
