"""How messages travel: addresses, the private socket folder, keys.

Every engine binds one address, every router connects to all of them. Routers learn the
addresses from the engines (`introduction.py`), which may run on several hosts.
"""

from __future__ import annotations

import atexit
import errno
import multiprocessing
import os
import shutil
import socket
import stat
import tempfile
from pathlib import Path
from urllib.parse import urlsplit

import zmq

from vllm_calrouter.hosts import is_loopback
from vllm_calrouter.options import OptionError

OFF = "off"
IPC = "ipc"

_IPC_URL = "ipc://"
_OPTION = "--router-config.telemetry"
#: In place of a host: each engine's own, as vLLM knows it.
_OWN_HOST = "*"
_ANY_HOST = ("0.0.0.0", "::")
_MOST_PORT = 65_535

#: Environment variable with the folder of a launch, and the processes that made one.
_FOLDER = "CALROUTER_SOCKETS"
_made_by: set[int] = set()


def endpoint(address: str, rank: int) -> str:
    """Where the engine of a rank tells: a file in the folder, or the port + rank."""
    if address.startswith(_IPC_URL):
        return f"{address}/engine-{rank}"
    host, port = _host_and_port(address)
    return f"tcp://{host}:{port + rank}"


def check_address(address: str, engines: int) -> None:
    """Raise OptionError when engines and routers could not meet at this address."""
    if address in (OFF, IPC):
        return
    if address.startswith(_IPC_URL):
        _check_folder(address)
    elif address.startswith("tcp://"):
        _check_tcp(address, engines)
    else:
        raise OptionError(
            f"{_OPTION} {address!r} is no address: write ipc, ipc:///FOLDER, "
            "tcp://HOST:PORT, tcp://*:PORT or off"
        )


def check_free(address: str, ranks: range) -> None:
    """Say now what would otherwise fail when all engines have loaded their models.

    Args:
        address: as `located` returns it.
        ranks: those that will bind it on this host.

    Raises:
        OptionError: a port or socket is in use, or the host is not this machine.
    """
    if address.startswith(_IPC_URL):
        _check_unused(address, ranks)
    if not address.startswith("tcp://"):
        return
    host, first = _host_and_port(address)
    for rank in ranks:
        port = first + rank
        try:
            _try_to_bind(host.strip("[]"), port)
        except OSError as error:
            raise OptionError(
                f"{_OPTION} {address} needs port {port} of {host} "
                f"({(error.strerror or str(error)).lower()}): name an address of this "
                f"machine with {len(ranks)} free ports in a row"
            ) from None


def host_of(address: str) -> str | None:
    """The host at which others reach an address here; None: it is no network's.

    Raises:
        OptionError: as `located`.
    """
    if not address.startswith("tcp://"):
        return None
    host, _ = _host_and_port(address)
    return _own_host() if host == _OWN_HOST else host


def make_folder(base: str) -> None:
    """Make a folder that only this user may open, for a launch that says just `ipc`.

    Processes started from now on find it by the environment: in the options it would
    change the key of vLLM's compile cache at every launch. It goes with this process.

    Raises:
        OptionError: its path is too long for a socket's.
    """
    folder = tempfile.mkdtemp(prefix="calrouter-", dir=base)
    atexit.register(_remove, folder, os.getpid())
    _check_length(folder)
    os.environ[_FOLDER] = folder
    _made_by.add(os.getpid())


def has_folder() -> bool:
    """Whether this launch has made its folder: here, or in the parent process.

    A value that came from elsewhere is another launch's.
    """
    ours = os.getpid() in _made_by or multiprocessing.parent_process() is not None
    return ours and _FOLDER in os.environ


def located(address: str) -> str:
    """The address with what only this launch knows: its folder for `ipc`, its host
    for `tcp://*`.

    Raises:
        OptionError: vLLM does not know this host's address.
    """
    if address == IPC:
        return _IPC_URL + os.environ[_FOLDER]
    if (host := host_of(address)) is None:
        return address
    return f"tcp://{host}:{_host_and_port(address)[1]}"


def own_host() -> str:
    """This host's address as vLLM knows it; `0.0.0.0` when it does not."""
    from vllm.utils.network_utils import get_ip

    host: str = get_ip()
    return host


def _own_host() -> str:
    host = own_host()
    if host in _ANY_HOST:
        raise OptionError(
            "this host's address, which --router-config.telemetry tcp://* stands for, "
            "is not known: set the environment variable VLLM_HOST_IP"
        )
    return f"[{host}]" if ":" in host else host


def check_private(address: str) -> None:
    """Raise PermissionError when others could reach the sockets in a folder."""
    if not address.startswith(_IPC_URL):
        return
    folder = address.removeprefix(_IPC_URL)
    found = os.lstat(folder)
    if not stat.S_ISDIR(found.st_mode):
        raise PermissionError(errno.EPERM, "not a folder", folder)
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise PermissionError(errno.EPERM, "others may open this folder", folder)


def is_open_to_strangers(address: str, keys: str | None) -> bool:
    """Whether who reaches this address over a network may listen."""
    if keys is not None or not address.startswith("tcp://"):
        return False
    host, _ = _host_and_port(address)
    return not is_loopback(host)


def prepare(plain: zmq.Socket[bytes], url: str) -> None:
    """Set what every socket here needs: IPv6 where written, nothing left behind."""
    plain.setsockopt(zmq.IPV6, int("[" in url))
    plain.setsockopt(zmq.LINGER, 0)


def remove_file(url: str) -> None:
    """Remove a socket's file, which ZeroMQ leaves behind."""
    if url.startswith(_IPC_URL):
        Path(url.removeprefix(_IPC_URL)).unlink(missing_ok=True)


def _remove(folder: str, owner: int) -> None:
    # A forked child that ends by itself must not take the folder along.
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)


def _check_folder(address: str) -> None:
    folder = address.removeprefix(_IPC_URL)
    _check_length(folder)
    try:
        check_private(address)
    except OSError as error:
        raise OptionError(
            f"{_OPTION} {address} cannot be used ({(error.strerror or '').lower()}): "
            f"name a folder of yours with mode 700, or write {IPC}"
        ) from None


def _check_unused(address: str, ranks: range) -> None:
    """Raise OptionError where a server that runs has one of these ranks' sockets: to
    bind it again would take its routers away from it."""
    for rank in ranks:
        path = endpoint(address, rank).removeprefix(_IPC_URL)
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(path)
            except OSError:
                # Not there, or left behind.
                continue
        raise OptionError(
            f"{_OPTION} {address} is in use by another server (engine {rank}): name a "
            f"folder of its own for each, or write {IPC}"
        )


def _check_length(folder: str) -> None:
    longest = str(Path(folder) / "engine-999999")
    if len(os.fsencode(longest)) > zmq.IPC_PATH_MAX_LEN:
        raise OptionError(
            f"{folder} is too long for a socket's path ({zmq.IPC_PATH_MAX_LEN} bytes): "
            f"set VLLM_RPC_BASE_PATH or write {_OPTION} ipc:///FOLDER"
        )


def _check_tcp(address: str, engines: int) -> None:
    host, port = _host_and_port(address)
    if host.strip("[]") in _ANY_HOST:
        raise OptionError(
            f"{_OPTION} {address}: routers cannot connect to every address at once: "
            f"name one of this machine, or write tcp://*:{port} for each host's own"
        )
    if port + engines - 1 > _MOST_PORT:
        raise OptionError(
            f"{_OPTION} {address}: {engines} engines need ports {port} to "
            f"{port + engines - 1}: write a port of {_MOST_PORT - engines + 1} or less"
        )


def _host_and_port(address: str) -> tuple[str, int]:
    parts = urlsplit(address)
    try:
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if not host or not port or parts.path or parts.query or parts.username:
        raise OptionError(
            f"{_OPTION} {address!r} lacks a host or a port: write tcp://HOST:PORT"
        )
    return (f"[{host}]" if ":" in host else host), port


def _try_to_bind(host: str, port: int) -> None:
    family, kind, protocol, _, place = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(place)
