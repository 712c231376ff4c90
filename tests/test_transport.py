from __future__ import annotations

import multiprocessing
import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import zmq

from vllm_calrouter import transport
from vllm_calrouter.options import OptionError

FOLDER = "CALROUTER_SOCKETS"


@pytest.fixture(autouse=True)
def no_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither this process nor its parent has launched anything."""
    monkeypatch.setattr(transport, "_made_by", set())
    monkeypatch.delenv(FOLDER, raising=False)


@pytest.mark.parametrize(
    ("address", "rank", "url"),
    [
        ("ipc:///run/x", 3, "ipc:///run/x/engine-3"),
        ("tcp://10.0.0.1:5600", 0, "tcp://10.0.0.1:5600"),
        ("tcp://node-a:5600", 3, "tcp://node-a:5603"),
        ("tcp://[::1]:5600", 1, "tcp://[::1]:5601"),
    ],
)
def test_every_rank_has_its_place(address: str, rank: int, url: str) -> None:
    assert transport.endpoint(address, rank) == url


@pytest.mark.parametrize(
    "address", ["ipc", "off", "tcp://127.0.0.1:65533", "tcp://*:5600"]
)
def test_what_works_passes(address: str) -> None:
    transport.check_address(address, 3)


@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("", "ipc:///FOLDER, tcp://HOST:PORT, tcp://*:PORT or off"),
        ("on", "ipc:///FOLDER, tcp://HOST:PORT, tcp://*:PORT or off"),
        ("udp://127.0.0.1:5600", "write ipc, ipc:///FOLDER"),
        ("tcp://127.0.0.1", "write tcp://HOST:PORT"),
        ("tcp://:5600", "write tcp://HOST:PORT"),
        ("tcp://127.0.0.1:0", "write tcp://HOST:PORT"),
        ("tcp://127.0.0.1:99999", "write tcp://HOST:PORT"),
        ("tcp://127.0.0.1:5600/x", "write tcp://HOST:PORT"),
        ("tcp://0.0.0.0:5600", "write tcp://*:5600 for each host's own"),
        ("tcp://[::]:5600", "name one of this machine"),
        ("tcp://127.0.0.1:65534", "write a port of 65533 or less"),
        ("ipc:///no/such/folder", "no such file"),
        ("ipc:///dev/null", "not a folder"),
        ("ipc:///", "others may open"),
        ("ipc:///" + "x" * 200, "too long"),
    ],
)
def test_what_cannot_work_says_what_to_write(address: str, says: str) -> None:
    with pytest.raises(OptionError) as error:
        transport.check_address(address, 3)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_ports_are_tried_before_models_are_loaded() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(OptionError, match=f"needs port {port} .*already in use"):
            transport.check_free(f"tcp://127.0.0.1:{port - 1}", range(2))
        # Rank 1's port is another host's.
        transport.check_free(f"tcp://127.0.0.1:{port - 1}", range(1))
    transport.check_free("ipc", range(2))


def test_a_folder_of_a_server_that_runs_is_refused(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}"
    transport.check_free(address, range(2))
    with zmq.Context() as context, context.socket(zmq.PUB) as engine:
        engine.bind(transport.endpoint(address, 1))
        with pytest.raises(OptionError, match=r"in use by another server \(engine 1\)"):
            transport.check_free(address, range(2))
        # Rank 1 is another launch's.
        transport.check_free(address, range(1))
    transport.check_free(address, range(2))


def test_an_address_of_another_machine_is_refused() -> None:
    # Of the range kept for documentation (RFC 5737).
    with pytest.raises(OptionError, match="name an address of this machine"):
        transport.check_free("tcp://192.0.2.1:5600", range(2))


@pytest.mark.parametrize(
    ("address", "keys", "is_open"),
    [
        ("ipc", None, False),
        ("tcp://127.0.0.1:5600", None, False),
        ("tcp://[::1]:5600", None, False),
        ("tcp://10.0.0.1:5600", "folder", False),
        ("tcp://10.0.0.1:5600", None, True),
    ],
)
def test_only_a_network_without_keys_is_open(
    address: str, keys: str | None, is_open: bool
) -> None:
    assert transport.is_open_to_strangers(address, keys) is is_open


def test_a_launch_gets_a_folder_that_nobody_else_may_open(tmp_path: Path) -> None:
    assert not transport.has_folder()
    transport.make_folder(str(tmp_path))
    assert transport.has_folder()
    address = transport.located("ipc")
    assert address == f"ipc://{os.environ[FOLDER]}"
    (folder,) = tmp_path.iterdir()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    transport.check_private(address)
    transport.check_address(address, 6)


def test_every_launch_has_a_folder_of_its_own(tmp_path: Path) -> None:
    transport.make_folder(str(tmp_path))
    first = transport.located("ipc")
    transport.make_folder(str(tmp_path))
    assert transport.located("ipc") != first


def test_another_address_stays_as_it_is() -> None:
    assert transport.located("tcp://127.0.0.1:1") == "tcp://127.0.0.1:1"


@pytest.mark.parametrize(
    ("host", "url"),
    [("10.0.0.7", "tcp://10.0.0.7:5600"), ("fd00::7", "tcp://[fd00::7]:5600")],
)
def test_a_star_is_each_host_s_own_address(
    monkeypatch: pytest.MonkeyPatch, host: str, url: str
) -> None:
    monkeypatch.setenv("VLLM_HOST_IP", host)
    assert transport.located("tcp://*:5600") == url


def test_a_host_without_an_address_is_told_how_to_name_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_HOST_IP", "0.0.0.0")
    with pytest.raises(OptionError, match="set the environment variable VLLM_HOST_IP"):
        transport.located("tcp://*:5600")


def test_the_folder_of_another_launch_is_not_ours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(FOLDER, "/elsewhere")
    assert not transport.has_folder()


def test_processes_of_the_launch_have_its_folder(tmp_path: Path) -> None:
    transport.make_folder(str(tmp_path))
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(transport.has_folder)
        assert pool.apply(transport.located, ["ipc"]) == transport.located("ipc")


def test_the_folder_goes_with_its_launch_and_not_with_a_child(tmp_path: Path) -> None:
    code = (
        "import os, sys\n"
        "from vllm_calrouter import transport\n"
        f"transport.make_folder({str(tmp_path)!r})\n"
        "folder = transport.located('ipc').removeprefix('ipc://')\n"
        "if os.fork() == 0:\n"
        "    sys.exit(0)\n"
        "os.wait()\n"
        "open(folder + '/engine-0', 'w').close()\n"
        "print(os.path.isdir(folder))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["True"]
    assert list(tmp_path.iterdir()) == []


def test_a_path_too_long_for_a_socket_is_refused(tmp_path: Path) -> None:
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    with pytest.raises(OptionError, match="set VLLM_RPC_BASE_PATH"):
        transport.make_folder(str(deep))
