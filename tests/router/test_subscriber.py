from __future__ import annotations

import asyncio
import math
import select
import time
from collections.abc import Callable, Iterator
from itertools import repeat
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from prometheus_client import CollectorRegistry

from tests.engine.messages import message
from vllm_calrouter import transport
from vllm_calrouter._core import Table
from vllm_calrouter.engine.publisher import Publisher
from vllm_calrouter.keys import load_keys, make_keys
from vllm_calrouter.messages import VERSION, EngineMessage, encode
from vllm_calrouter.router import subscriber as module
from vllm_calrouter.router.metrics import RouterMetrics
from vllm_calrouter.router.subscriber import Subscriber

#: How long a failing test takes, and nothing else.
PATIENCE_S = 20.0


@pytest.fixture
def address(tmp_path: Path) -> str:
    folder = tmp_path / "s"
    folder.mkdir(mode=0o700)
    return f"ipc://{folder}"


def urls(address: str, engines: int) -> list[str]:
    return [transport.endpoint(address, rank) for rank in range(engines)]


class Setting:
    """A router's ear, and engines that send whatever bytes a test wants.

    `XPUB` in place of an engine's `PUB` tells when the router has subscribed.
    """

    def __init__(self, address: str, engines: int = 2) -> None:
        self.now_s = 100.0
        self.registry = CollectorRegistry()
        self.table = Table(engines)
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.engines = [self._engine(address, rank) for rank in range(engines)]
        self.subscriber = Subscriber(
            urls(address, engines),
            router="me",
            table=self.table,
            metrics=RouterMetrics(self.registry),
            clock=lambda: self.now_s,
        )
        for engine in self.engines:
            assert engine.poll(PATIENCE_S * 1000), "the router did not subscribe"

    def _engine(self, address: str, rank: int) -> zmq.Socket[bytes]:
        engine = self.context.socket(zmq.XPUB)
        engine.setsockopt(zmq.LINGER, 0)
        engine.bind(transport.endpoint(address, rank))
        return engine

    def send(self, data: bytes | EngineMessage, rank: int = 0) -> str:
        """Send to the router and let it read; what it counted it as."""
        before = self.outcomes(rank)
        raw = data if isinstance(data, bytes) else encode(data)
        self.engines[rank].send(raw)
        self.until(lambda: self.outcomes(rank) != before)
        (new,) = (k for k, v in self.outcomes(rank).items() if v != before.get(k))
        return new

    def until(self, true: Callable[[], bool], *, drain: bool = True) -> None:
        deadline_s = time.monotonic() + PATIENCE_S
        while not true():
            assert time.monotonic() < deadline_s, "it did not come"
            if drain:
                self.subscriber.drain()

    def outcomes(self, rank: int) -> dict[str, float]:
        return {
            sample.labels["outcome"]: sample.value
            for metric in self.registry.collect()
            for sample in metric.samples
            if sample.name == "vllm:calrouter_messages_total"
            and sample.labels["engine"] == str(rank)
        }

    def silence_s(self, rank: int) -> float | None:
        name = "vllm:calrouter_engine_silence_seconds"
        return self.registry.get_sample_value(name, {"engine": str(rank)})

    def close(self) -> None:
        self.subscriber.close()
        for engine in self.engines:
            engine.close()
        self.context.term()


@pytest.fixture
def setting(address: str) -> Iterator[Setting]:
    made = Setting(address)
    yield made
    made.close()


def test_the_table_of_the_core_takes_messages() -> None:
    hears = Table(2)
    assert hears


def test_a_message_goes_into_the_table(setting: Setting) -> None:
    sent = message(seen={"me": 4, "other": 9})
    assert setting.send(sent) == "heard"
    row = setting.table.heard(0)
    assert row is not None
    for name in set(row) - {"booking_seen", "now_s"}:
        assert row[name] == getattr(sent, name), name  # type: ignore[literal-required]
    assert row["booking_seen"] == 4
    assert row["now_s"] == 100.0
    assert setting.table.heard(1) is None


def test_bookings_of_a_router_that_was_not_seen_are_unseen(setting: Setting) -> None:
    setting.send(message(seen={"other": 9}))
    row = setting.table.heard(0)
    assert row is not None
    assert row["booking_seen"] == 0


NEWER = msgspec.msgpack.encode([VERSION + 1, 0, "both"])
REFUSED = [
    (b"", "garbage"),
    (b"\xff" * 40, "garbage"),
    (b"\x80\x04\x95pickle", "garbage"),
    (encode(message())[:-3], "garbage"),
    (encode(message(kv_free_blocks=9, kv_total_blocks=8)), "garbage"),
    (NEWER, "wrong_version"),
    (encode(message(rank=1)), "wrong_rank"),
    (encode(message(rank=77)), "wrong_rank"),
]


@pytest.mark.parametrize(("data", "outcome"), REFUSED)
def test_what_is_no_message_of_this_engine_is_counted_and_ignored(
    setting: Setting, data: bytes, outcome: str
) -> None:
    assert setting.send(data) == outcome
    assert [setting.table.heard(rank) for rank in range(2)] == [None, None]
    assert setting.subscriber.heard(0) is None
    assert setting.send(message()) == "heard"


@pytest.mark.parametrize("sequence", [4, 5])
def test_what_comes_late_or_twice_changes_nothing(
    setting: Setting, sequence: int
) -> None:
    setting.send(message(sequence=5, running=1))
    setting.now_s += 10.0
    assert setting.send(message(sequence=sequence, running=2)) == "stale"
    heard = setting.subscriber.heard(0)
    assert heard is not None
    assert (heard.message.running, heard.at_s) == (1, 100.0)
    assert setting.subscriber.silence_s(0) == 10.0


def test_an_engine_that_starts_again_is_heard_from_its_first_message(
    setting: Setting,
) -> None:
    setting.send(message(incarnation=1, sequence=900, running=1))
    assert setting.send(message(incarnation=2, sequence=1, running=2)) == "heard"
    # What comes late from the one that died stands until the living one speaks.
    setting.send(message(incarnation=1, sequence=901, running=3))
    assert setting.send(message(incarnation=2, sequence=2, running=2)) == "heard"
    heard = setting.subscriber.heard(0)
    assert heard is not None
    assert heard.message.running == 2


class Queue:
    """In place of a socket: what waits in it, and how often it was asked."""

    def __init__(self, waiting: Iterator[bytes]) -> None:
        self.waiting = waiting
        self.reads = 0

    def recv(self, flags: int) -> bytes:
        assert flags == zmq.NOBLOCK
        for data in self.waiting:
            self.reads += 1
            return data
        raise zmq.Again

    def close(self) -> None: ...


@pytest.fixture
def queued(setting: Setting) -> Callable[[Iterator[bytes]], Queue]:
    def replace(waiting: Iterator[bytes]) -> Queue:
        setting.subscriber._signals.unregister(setting.subscriber._sockets[0].FD)
        setting.subscriber._sockets[0].close()
        queue = Queue(waiting)
        setting.subscriber._sockets[0] = queue  # type: ignore[call-overload]
        setting.subscriber._unread.add(0)
        return queue

    return replace


def test_of_many_messages_only_the_newest_is_taken(
    setting: Setting, queued: Callable[[Iterator[bytes]], Queue]
) -> None:
    many = [encode(message(sequence=sequence)) for sequence in range(1, 101)]
    queue = queued(iter([b"garbage", *many]))
    setting.subscriber.drain()
    assert queue.reads == 101
    heard = setting.subscriber.heard(0)
    assert heard is not None
    assert heard.message.sequence == 100
    assert setting.outcomes(0) == {"heard": 1.0}


def test_an_engine_that_floods_does_not_hold_the_router_up(
    setting: Setting, queued: Callable[[Iterator[bytes]], Queue]
) -> None:
    queue = queued(repeat(b"more"))
    setting.subscriber.drain()
    assert queue.reads == module._MOST_QUEUED
    # What was left is read, although nothing new signals it.
    setting.subscriber.drain()
    assert queue.reads == 2 * module._MOST_QUEUED
    assert setting.outcomes(0) == {"garbage": 2.0}


def test_a_look_a_moment_ago_is_fresh_enough(setting: Setting) -> None:
    (fd,) = (fd for fd, rank in setting.subscriber._rank_of.items() if rank == 0)
    setting.subscriber.drain()
    setting.engines[0].send(encode(message()))
    select.select([fd], [], [], PATIENCE_S)
    setting.now_s += module.FRESH_S / 2
    setting.subscriber.refresh()
    assert setting.subscriber.heard(0) is None

    def is_heard() -> bool:
        setting.now_s += module.FRESH_S
        setting.subscriber.refresh()
        return setting.subscriber.heard(0) is not None

    setting.until(is_heard, drain=False)


async def test_figures_and_silence_are_kept_fresh_without_being_asked(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "TICK_S", 0.001)
    task = asyncio.create_task(setting.subscriber.run())
    setting.engines[1].send(encode(message(rank=1)))
    deadline_s = time.monotonic() + PATIENCE_S
    while setting.silence_s(1) != 0.0 and time.monotonic() < deadline_s:
        await asyncio.sleep(0.001)
    setting.now_s += 7.0
    while setting.silence_s(1) == 0.0 and time.monotonic() < deadline_s:
        await asyncio.sleep(0.001)
    assert setting.silence_s(0) == math.inf
    assert setting.silence_s(1) == 7.0
    task.cancel()


async def test_a_fault_does_not_end_the_listening(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "TICK_S", 0.001)
    faults = iter([True])

    def fault_once(*_: Any) -> None:
        if next(faults, False):
            raise ZeroDivisionError

    monkeypatch.setattr(setting.subscriber, "_tell_silence", fault_once)
    task = asyncio.create_task(setting.subscriber.run())
    setting.engines[0].send(encode(message()))
    deadline_s = time.monotonic() + PATIENCE_S
    while setting.subscriber.heard(0) is None and time.monotonic() < deadline_s:
        await asyncio.sleep(0.001)
    assert setting.subscriber.heard(0) is not None
    assert next(faults, None) is None
    task.cancel()


def test_the_page_says_what_was_heard_and_how_long_ago(setting: Setting) -> None:
    setting.send(message(seen={"me": 4}, running=3))
    setting.now_s += 2.5
    first, second = setting.subscriber.describe()
    assert (first["rank"], first["running"], first["booking_seen"]) == (0, 3, 4)
    assert first["age_s"] == 2.5
    assert first["recent_steps"][0]["decode_seqs"] == 0
    assert second == {"rank": 1, "age_s": None}


def test_closing_twice_is_closing(address: str) -> None:
    ear = Subscriber(urls(address, 2), router="me", table=Table(2))
    ear.close()
    ear.close()
    ear.drain()


def test_a_folder_that_others_may_open_is_refused(address: str) -> None:
    Path(address.removeprefix("ipc://")).chmod(0o777)
    with pytest.raises(PermissionError, match="others may open"):
        Subscriber(urls(address, 2), router="me", table=Table(2))


@pytest.mark.parametrize("with_keys", [False, True])
@pytest.mark.parametrize("restarts", [0, 2])
def test_an_engine_s_publisher_is_heard_whenever_it_starts(
    address: str, tmp_path: Path, with_keys: bool, restarts: int
) -> None:
    folder = tmp_path / "keys"
    make_keys(folder)

    def keys(side: Any) -> Any:
        return load_keys(folder, side) if with_keys else None

    table = Table(1)
    ear = Subscriber(urls(address, 1), router="me", table=table, keys=keys("router"))
    for incarnation in range(1, restarts + 2):
        engine = Publisher(address, 0, keys=keys("engine"), heartbeat_s=0.01)
        engine.tell(message(incarnation=incarnation), None)
        deadline_s = time.monotonic() + PATIENCE_S
        while (row := table.heard(0)) is None or row["incarnation"] != incarnation:
            assert time.monotonic() < deadline_s
            ear.drain()
        engine.close()
    ear.close()


def test_an_engine_without_our_engines_keys_changes_nothing(
    address: str, tmp_path: Path
) -> None:
    for name in ("ours", "theirs"):
        make_keys(tmp_path / name)
    table = Table(2)
    ear = Subscriber(
        urls(address, 2),
        router="me",
        table=table,
        keys=load_keys(tmp_path / "ours", "router"),
    )
    theirs = load_keys(tmp_path / "theirs", "engine")
    stranger = Publisher(address, 0, keys=theirs, heartbeat_s=0.01)
    ours = load_keys(tmp_path / "ours", "engine")
    engine = Publisher(address, 1, keys=ours, heartbeat_s=0.01)
    stranger.tell(message(), None)
    engine.tell(message(rank=1), None)
    deadline_s = time.monotonic() + PATIENCE_S
    while table.heard(1) is None and time.monotonic() < deadline_s:
        ear.drain()
    assert table.heard(1) is not None
    assert table.heard(0) is None
    for each in (stranger, engine, ear):
        each.close()
