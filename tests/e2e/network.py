"""Two hosts on one machine: network namespaces with a wire between them.

Needs root and `ip` (iproute2). The network is RFC 2544's, which no machine should use.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
from types import TracebackType

#: A day: no interval of a test's is as long.
AHEAD_S = 86_400

_WIRE = ("198.18.1.1", "198.18.1.2")
_OUTSIDE = ("198.18.2.1", "198.18.2.2")
_BITS = 30
_NUMBERS = itertools.count(1)


class Network:
    """Hosts `a` and `b` with a wire between them, and one from here to `a` only.

    Each host has its own loopback and sees none of this machine's addresses. Use it as
    a context manager: it takes away what it has made.
    """

    def __init__(self) -> None:
        #: The hosts' addresses on the wire, and where `a` is reached from here.
        self.address = dict(zip("ab", _WIRE, strict=True))
        self.entrance = _OUTSIDE[1]
        # Names of interfaces are at most 15 characters.
        name = f"cal{os.getpid()}n{next(_NUMBERS)}"
        self._names = {host: name + host for host in "ab"}
        self._here = name + "o"

    def inside(self, host: str) -> list[str]:
        """A command that runs what follows it on a host."""
        return ["ip", "netns", "exec", self._names[host]]

    def received_bytes(self, host: str) -> int:
        """Bytes that have come to a host over the wire."""
        shown = _run("ip", "-n", self._names[host], "-s", "-j", "link", "show", "wire")
        count: int = json.loads(shown)[0]["stats64"]["rx"]["bytes"]
        return count

    def __enter__(self) -> Network:
        try:
            self._make()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._remove()

    def _make(self) -> None:
        a, b = self._names["a"], self._names["b"]
        for name in (a, b):
            _run("ip", "netns", "add", name)
            _run("ip", "-n", name, "link", "set", "lo", "up")
        _run(
            *("ip", "link", "add", "wire", "netns", a, "type", "veth"),
            *("peer", "name", "wire", "netns", b),
        )
        _run(
            *("ip", "link", "add", self._here, "type", "veth"),
            *("peer", "name", "outside", "netns", a),
        )
        _set_up(["-n", a], "wire", _WIRE[0])
        _set_up(["-n", b], "wire", _WIRE[1])
        _set_up([], self._here, _OUTSIDE[0])
        _set_up(["-n", a], "outside", _OUTSIDE[1])

    def _remove(self) -> None:
        # A wire goes with either of its ends. With a namespace it goes some time later,
        # and the next network may be there before.
        subprocess.run(["ip", "link", "del", self._here], capture_output=True)
        for name in self._names.values():
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def why_not() -> str | None:
    """Why this machine cannot have such hosts; None when it can."""
    if shutil.which("ip") is None:
        return "needs `ip` (iproute2)"
    try:
        with Network():
            return None
    except subprocess.CalledProcessError as error:
        reason = (error.stderr or "").strip().splitlines()
        return f"network namespaces cannot be made here: {' '.join(reason[-1:])}"


def other_clock() -> list[str]:
    """A command that runs what follows it on a monotonic clock of its own.

    As on another machine, which was booted at another time. Empty where the kernel has
    no time namespaces.
    """
    shift = ["unshare", "--time", "--monotonic", str(AHEAD_S), "--"]
    try:
        _run(*shift, "true")
    except (OSError, subprocess.CalledProcessError):
        return []
    return shift


def _set_up(where: list[str], interface: str, address: str) -> None:
    _run("ip", *where, "address", "add", f"{address}/{_BITS}", "dev", interface)
    _run("ip", *where, "link", "set", interface, "up")


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout
