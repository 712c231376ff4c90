from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from vllm_calrouter.hosts import Launch, is_loopback
from vllm_calrouter.keys import make_keys
from vllm_calrouter.launch import check_config, resolve
from vllm_calrouter.options import OptionError, RouterOptions

#: Of the range kept for documentation (RFC 5737): nobody's.
HEAD = "192.0.2.1"
SPLIT = {"prefill": 1, "telemetry": "tcp://*:5600"}
NIXL_HOST = {"VLLM_NIXL_SIDE_CHANNEL_HOST": "192.0.2.7"}


@pytest.fixture(autouse=True)
def own_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine, whose ports are not tried, is called one of a network's."""
    monkeypatch.setenv("VLLM_HOST_IP", "192.0.2.7")
    monkeypatch.setattr("vllm_calrouter.transport.check_free", lambda *_: None)


def launch(**changes: Any) -> Namespace:
    """Rank 0 of two and the API servers."""
    settings: dict[str, Any] = {
        "router_plugin": "calrouter",
        "router_policy": None,
        "router_config": SPLIT,
        "data_parallel_size": 2,
        "data_parallel_size_local": 1,
        "data_parallel_address": HEAD,
        **changes,
    }
    return Namespace(**settings)


def headless(**changes: Any) -> Namespace:
    """Rank 1 of two."""
    return launch(**{"headless": True, "data_parallel_start_rank": 1, **changes})


GOOD = [
    (launch(), NIXL_HOST),
    # Nobody reads KV caches from a host that only decodes.
    (headless(), {}),
    # All engines elsewhere.
    (launch(data_parallel_size_local=0), {}),
    (
        headless(data_parallel_size_local=None, data_parallel_start_rank=None),
        NIXL_HOST,
    ),
    # No KV cache moves.
    (launch(router_config={"telemetry": "off"}), {}),
    # Two launches on one machine.
    (
        launch(
            data_parallel_address="127.0.0.1",
            router_config={"prefill": 1, "telemetry": "tcp://127.0.0.1:5600"},
        ),
        {},
    ),
]


@pytest.mark.parametrize(("args", "environ"), GOOD)
def test_what_finds_each_other_passes(args: Namespace, environ: dict[str, str]) -> None:
    assert resolve(args, environ) is not None


@pytest.mark.parametrize(
    ("rank", "order", "reads"),
    [(0, "deadline", True), (0, "fcfs", False), (1, "deadline", False)],
)
def test_a_host_of_engines_needs_the_profile_for_an_order_only(
    rank: int, order: str, reads: bool
) -> None:
    config = {**SPLIT, "order": order, "profile": "/nowhere.json"}
    args = headless(data_parallel_start_rank=rank, router_config=config)
    if not reads:
        assert resolve(args, NIXL_HOST) is not None
        return
    with pytest.raises(OptionError, match=r"router-config\.profile: .*nowhere"):
        resolve(args, NIXL_HOST)


SIDE_CHANNEL = "set the environment variable VLLM_NIXL_SIDE_CHANNEL_HOST"
STAR = "write --router-config.telemetry 'tcp://*:5600'"
WRONG = [
    (launch(), {}, SIDE_CHANNEL),
    (launch(), {"VLLM_NIXL_SIDE_CHANNEL_HOST": "localhost"}, SIDE_CHANNEL),
    (launch(), {"VLLM_NIXL_SIDE_CHANNEL_HOST": "0.0.0.0"}, SIDE_CHANNEL),
    (launch(data_parallel_address=None), NIXL_HOST, "add --data-parallel-address"),
    (headless(data_parallel_address=None), {}, "add --data-parallel-address"),
    (launch(router_config={"prefill": 1}), NIXL_HOST, STAR),
    (headless(router_config={"prefill": 1}), {}, STAR),
    (
        launch(router_config={"prefill": 1, "telemetry": "tcp://127.0.0.1:5600"}),
        NIXL_HOST,
        STAR,
    ),
    (launch(data_parallel_start_rank=0), NIXL_HOST, "add --headless"),
    (headless(data_parallel_size_local=2), {}, "ranks 1 to 2 are not all of the 2"),
    (headless(data_parallel_start_rank=-1), {}, "are not all of the 2"),
    (headless(data_parallel_size_local=0), {}, "--data-parallel-size-local 1 or more"),
    (headless(data_parallel_rank=1), {}, "drop --data-parallel-rank"),
]


@pytest.mark.parametrize(("args", "environ", "says"), WRONG)
def test_what_would_not_find_each_other_says_what_to_write(
    args: Namespace, environ: dict[str, str], says: str
) -> None:
    with pytest.raises(OptionError) as error:
        resolve(args, environ)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_a_host_whose_address_is_not_known_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_HOST_IP", "127.0.0.1")
    with pytest.raises(OptionError, match="does not reach engines on other hosts"):
        resolve(headless(), {})


def test_engines_need_no_file_of_the_router_s() -> None:
    config = {
        **SPLIT,
        "journal": "/proc/none/journal",
        "policy": "calibrated",
        "profile": "/proc/none/profile.json",
    }
    assert resolve(headless(router_config=config), {}) is not None
    with pytest.raises(OptionError):
        resolve(launch(router_config=config), NIXL_HOST)


def test_engines_need_only_their_side_s_keys(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    make_keys(folder)
    for name in ("router.key_secret", "engine.key"):
        (folder / name).unlink()
    config = {**SPLIT, "telemetry_keys": str(folder)}
    assert resolve(headless(router_config=config), {}) is not None
    with pytest.raises(OptionError, match=r"router\.key_secret is not there"):
        resolve(launch(router_config=config), NIXL_HOST)


@pytest.mark.parametrize("is_headless", [False, True])
def test_the_finished_configuration_is_checked_likewise(is_headless: bool) -> None:
    class Config:
        class parallel_config:  # noqa: N801
            data_parallel_size = 2
            data_parallel_size_local = 1
            data_parallel_rank = int(is_headless)
            data_parallel_master_ip = HEAD

    options = RouterOptions(telemetry="tcp://*:5600")
    check_config(Config, options, headless=is_headless)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="does not reach"):
        check_config(Config, RouterOptions(), headless=is_headless)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.0.0.2", True),
        ("localhost", True),
        ("[::1]", True),
        ("::1", True),
        ("192.0.2.1", False),
        ("node-a", False),
    ],
)
def test_loopback_is_a_machine_s_name_for_itself(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


def test_a_launch_of_everything_is_no_part() -> None:
    assert not Launch(4, range(4)).is_part
    assert Launch(4, range(3)).is_part
    assert Launch(4, range(4), headless=True).is_part
