from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from tests.engine.messages import message
from vllm_calrouter import transport
from vllm_calrouter.engine.publisher import Publisher
from vllm_calrouter.keys import Keys, load_keys, make_keys
from vllm_calrouter.messages import EngineMessage, decode

#: Nothing here depends on how fast this is; it is how long a failing test takes.
PATIENCE_S = 20.0

NEVER_S = 1e6


@pytest.fixture
def address(tmp_path: Path) -> str:
    folder = tmp_path / "s"
    folder.mkdir(mode=0o700)
    return f"ipc://{folder}"


class Ear:
    """A socket like a router's, which keeps all it hears."""

    def __init__(self, url: str, keys: Keys | None = None) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self.context.socket(zmq.SUB)
        self.socket.setsockopt(zmq.SUBSCRIBE, b"")
        self.socket.setsockopt(zmq.LINGER, 0)
        if keys is not None:
            keys.use(self.socket, "router")
        self.socket.connect(url)

    def hear(self, wait_s: float = PATIENCE_S) -> EngineMessage:
        data = self.hear_or_not(wait_s)
        assert data is not None, "nothing was heard"
        return decode(data)

    def hear_or_not(self, wait_s: float) -> bytes | None:
        return self.socket.recv() if self.socket.poll(wait_s * 1000) else None

    def close(self) -> None:
        self.socket.close()
        self.context.term()


@pytest.fixture
def ears() -> Iterator[Any]:
    opened: list[Ear] = []

    def listen(url: str, keys: Keys | None = None) -> Ear:
        opened.append(Ear(url, keys))
        return opened[-1]

    yield listen
    for ear in opened:
        ear.close()


@pytest.fixture
def publishers() -> Iterator[Any]:
    opened: list[Publisher] = []

    def publish(address: str, rank: int = 0, **settings: Any) -> Publisher:
        opened.append(Publisher(address, rank, **settings))
        return opened[-1]

    yield publish
    for publisher in opened:
        publisher.close()


def test_what_is_told_is_heard(address: str, publishers: Any, ears: Any) -> None:
    publisher = publishers(address, 2)
    ear = ears(transport.endpoint(address, 2))
    publisher.tell(message(rank=2, running=7), None)
    heard = ear.hear()
    assert (heard.rank, heard.running) == (2, 7)


def test_several_routers_hear_the_same(
    address: str, publishers: Any, ears: Any
) -> None:
    publisher = publishers(address)
    publisher.tell(message(running=7), None)
    for ear in [ears(transport.endpoint(address, 0)) for _ in range(5)]:
        assert ear.hear().running == 7


def test_an_idle_engine_says_the_same_again_under_a_new_number(
    address: str, publishers: Any, ears: Any
) -> None:
    publisher = publishers(address, heartbeat_s=0.01)
    publisher.tell(message(running=7), None)
    ear = ears(transport.endpoint(address, 0))
    first, second = ear.hear(), ear.hear()
    assert second.sequence > first.sequence
    assert (first.running, second.running) == (7, 7)


def test_before_anything_is_told_nothing_is_said(address: str, publishers: Any) -> None:
    publisher = publishers(address, heartbeat_s=0.001)
    time.sleep(0.05)
    assert publisher.sent == 0


def test_of_many_states_the_newest_is_sent_and_few_messages(
    address: str, publishers: Any, ears: Any
) -> None:
    publisher = publishers(address, min_interval_s=0.2, heartbeat_s=0.2)
    ear = ears(transport.endpoint(address, 0))
    publisher.tell(message(running=10_000), None)
    ear.hear()
    for running in range(10_000):
        publisher.tell(message(running=running), None)
    began_s = time.monotonic()
    while ear.hear().running != 9_999:
        assert time.monotonic() - began_s < PATIENCE_S
    assert publisher.sent < 1000


def test_messages_keep_their_distance(address: str, publishers: Any) -> None:
    publisher = publishers(address, min_interval_s=0.8, heartbeat_s=0.001)
    publisher.tell(message(), None)
    deadline_s = time.monotonic() + PATIENCE_S
    while publisher.sent == 0 and time.monotonic() < deadline_s:
        time.sleep(0.001)
    sent_s = time.monotonic()
    publisher.tell(message(), None)
    while publisher.sent == 1 and time.monotonic() < deadline_s:
        time.sleep(0.001)
    assert publisher.sent == 2
    # Half: this thread may have seen the first one late.
    assert time.monotonic() - sent_s > 0.4


def test_telling_never_waits_for_a_router_that_reads_nothing(
    address: str, publishers: Any, ears: Any
) -> None:
    publisher = publishers(address, min_interval_s=0.0, heartbeat_s=NEVER_S)
    deaf = ears(transport.endpoint(address, 0))
    deaf.socket.setsockopt(zmq.RCVHWM, 1)
    big = message(seen={f"{n:064}": n for n in range(200)})
    while publisher.sent < 2000:
        publisher.tell(big, None)
        # Lets the thread have its turn.
        time.sleep(0)
    assert publisher._thread.is_alive()


def test_the_age_of_the_step_is_that_of_the_sending(
    address: str, publishers: Any, ears: Any
) -> None:
    now_s = [10.0]
    publisher = publishers(address, heartbeat_s=0.01, clock=lambda: now_s[0])
    publisher.tell(message(), 8.0)
    ear = ears(transport.endpoint(address, 0))
    assert ear.hear().step_age_s == 2.0
    now_s[0] = 13.0
    while (age_s := ear.hear().step_age_s) == 2.0:
        pass
    assert age_s == 5.0
    publisher.tell(message(), None)
    while ear.hear().step_age_s == 5.0:
        pass
    assert ear.hear().step_age_s == 0.0


def test_the_socket_file_goes_with_the_publisher(address: str) -> None:
    publisher = Publisher(address, 0)
    file = Path(transport.endpoint(address, 0).removeprefix("ipc://"))
    assert file.exists()
    threads = threading.active_count()
    publisher.close()
    publisher.close()
    assert not file.exists()
    assert threading.active_count() == threads - 1


def test_a_folder_that_others_may_open_is_refused(address: str) -> None:
    Path(address.removeprefix("ipc://")).chmod(0o755)
    with pytest.raises(PermissionError, match="others may open"):
        Publisher(address, 0)


def test_a_port_in_use_is_named(publishers: Any) -> None:
    with zmq.Context() as context, context.socket(zmq.PUB) as taken:
        port = taken.bind_to_random_port("tcp://127.0.0.1")
        with pytest.raises(OSError, match=rf"in use .*127\.0\.0\.1:{port}"):
            Publisher(f"tcp://127.0.0.1:{port - 1}", 1)


# --- Keys ---


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("keys") / "ours"
    make_keys(place)
    return place


@pytest.fixture(scope="module")
def strangers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("keys") / "theirs"
    make_keys(place)
    return place


def test_with_keys_a_router_hears(
    address: str, folder: Path, publishers: Any, ears: Any
) -> None:
    publisher = publishers(address, keys=load_keys(folder, "engine"), heartbeat_s=0.01)
    publisher.tell(message(running=7), None)
    url = transport.endpoint(address, 0)
    assert ears(url, load_keys(folder, "router")).hear().running == 7


def test_a_stranger_hears_nothing(
    address: str, folder: Path, strangers: Path, publishers: Any, ears: Any
) -> None:
    publisher = publishers(address, keys=load_keys(folder, "engine"), heartbeat_s=0.01)
    publisher.tell(message(), None)
    url = transport.endpoint(address, 0)
    theirs = load_keys(strangers, "router")
    # Not who has no keys, nor his own, nor even one who got hold of the engines'
    # public key, which is no secret.
    without = ears(url)
    other = ears(url, theirs)
    informed = ears(
        url, Keys(theirs.public, theirs.secret, load_keys(folder, "router").other)
    )
    ears(url, load_keys(folder, "router")).hear()
    for stranger in (without, other, informed):
        assert stranger.hear_or_not(0.2) is None


def test_a_stranger_who_sends_changes_nothing(
    address: str, folder: Path, publishers: Any, ears: Any
) -> None:
    publisher = publishers(address, keys=load_keys(folder, "engine"), heartbeat_s=0.01)
    publisher.tell(message(running=7), None)
    url = transport.endpoint(address, 0)
    with zmq.Context() as context, context.socket(zmq.XSUB) as stranger:
        stranger.setsockopt(zmq.LINGER, 0)
        stranger.connect(url)
        for _ in range(100):
            stranger.send(b"\x01garbage")
        assert ears(url, load_keys(folder, "router")).hear().running == 7
