from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from vllm_calrouter import introduction, transport
from vllm_calrouter.engine.scheduler import introduce
from vllm_calrouter.introduction import check, clock_name, read
from vllm_calrouter.keys import load_keys, make_keys
from vllm_calrouter.options import OptionError, RouterOptions


@pytest.fixture(autouse=True)
def own_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_HOST_IP", "10.0.0.7")


OPTIONS: dict[str, Any] = {"prefill": 1, "telemetry": "tcp://*:5600"}


def told(rank: int, **options: Any) -> Any:
    """An engine's introduction as it comes over vLLM's channel."""
    about = introduce(RouterOptions(**{**OPTIONS, **options}), rank)
    return msgspec.msgpack.decode(msgspec.msgpack.encode(about))


def test_engines_say_where_they_are() -> None:
    first, second = read([told(1), told(0)])
    assert (first.rank, first.url) == (0, "tcp://10.0.0.7:5600")
    assert (second.rank, second.url) == (1, "tcp://10.0.0.7:5601")
    assert first.host == second.host == "10.0.0.7"


def test_an_engine_that_tells_nothing_says_so() -> None:
    (engine,) = read([told(0, telemetry="off")])
    assert engine.url is None


def test_the_address_is_the_one_that_the_engine_binds(tmp_path: Path) -> None:
    (engine,) = read([told(0, telemetry=f"ipc://{tmp_path}")])
    assert engine.url == transport.endpoint(f"ipc://{tmp_path}", 0)


def test_engines_started_alike_pass() -> None:
    options = RouterOptions(**OPTIONS, policy="round_robin", journal="here")
    check(read([told(0), told(1, telemetry="tcp://10.0.0.8:7")]), options, None)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"prefill": 0}, "was started with prefill 0, this router with 1"),
        ({"decode_max_num_seqs": 8}, "decode_max_num_seqs 8, this router with None"),
        ({"kv_load_failure": "fail"}, "kv_load_failure fail"),
        ({"order": "fcfs"}, "order fcfs, this router with deadline"),
        ({"patience": 9.0}, "patience 9.0, this router with 2.0"),
        ({"telemetry": "off"}, "telemetry off, this router with tcp://"),
    ],
)
def test_an_engine_started_otherwise_is_named(
    options: dict[str, Any], says: str
) -> None:
    engines = read([told(0), told(1, **options)])
    with pytest.raises(OptionError, match=r"engine 1 on 10\.0\.0\.7") as error:
        check(engines, RouterOptions(**OPTIONS), None)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_every_option_that_engines_act_on_is_compared() -> None:
    limits = RouterOptions(
        prefill_max_num_seqs=1,
        prefill_max_num_batched_tokens=2,
        decode_max_num_seqs=3,
        decode_max_num_batched_tokens=4,
    )
    for role in ("prefill", "decode"):
        for name in limits.role_limits(prefill=role == "prefill"):
            assert f"{role}_{name}" in introduction.SHARED


@pytest.mark.parametrize("router", [None, "a", "b"])
@pytest.mark.parametrize("engine", [None, "a", "b"])
def test_keys_must_be_of_one_folder(
    tmp_path: Path, engine: str | None, router: str | None
) -> None:
    for name in "ab":
        make_keys(tmp_path / name)
    folder = str(tmp_path / engine) if engine else None
    engines = read([told(0), told(1, telemetry_keys=folder)][1:])
    keys = load_keys(tmp_path / router, "router") if router else None
    if engine == router:
        check(engines, RouterOptions(**OPTIONS), keys)
    else:
        with pytest.raises(OptionError, match="has other telemetry keys"):
            check(engines, RouterOptions(**OPTIONS), keys)


def test_no_secret_key_is_told(tmp_path: Path) -> None:
    make_keys(tmp_path / "k")
    about = str(told(0, telemetry_keys=str(tmp_path / "k")))
    keys = load_keys(tmp_path / "k", "engine")
    assert keys.public.decode() in about
    assert keys.secret.decode() not in about


def test_processes_of_one_machine_have_one_clock() -> None:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(clock_name) == clock_name()


def test_where_nothing_is_known_no_two_clocks_are_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(introduction, "_BOOT", tmp_path / "none")
    monkeypatch.setattr(introduction, "_TIME_NAMESPACE", str(tmp_path / "none"))
    assert clock_name() != clock_name()
