"""Hears the engines' messages and puts them into the load table."""

from __future__ import annotations

import asyncio
import math
import select
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec
import zmq
from vllm.logger import init_logger

from vllm_calrouter import transport
from vllm_calrouter._core import Table
from vllm_calrouter.keys import Keys
from vllm_calrouter.messages import (
    MOST_BYTES,
    EngineMessage,
    MessageError,
    VersionError,
    decode,
)
from vllm_calrouter.router.metrics import RouterMetrics

logger = init_logger("vllm.calrouter")

#: Where nobody asks for fresh figures, messages are read this often.
TICK_S = 0.1

#: Figures this fresh are fresh enough: engines send one message in 5 ms at most, and
#: looking costs microseconds.
FRESH_S = 0.002

#: Messages of one engine that may wait to be read: several ticks' worth.
_MOST_QUEUED = 128

_RECONNECT_MS = 50
_MOST_RECONNECT_MS = 1000


class Heard(NamedTuple):
    """An engine's last message, and when it was read (seconds, the router's clock)."""

    message: EngineMessage
    at_s: float


class Subscriber:
    """One router's ear: a socket an engine, of which the newest message counts.

    Nothing here waits, and no thread is needed: ZeroMQ receives in the background, and
    `refresh` reads when a choice is made. Older messages are dropped unread.

    Args:
        urls: where each engine tells, by rank (`Introduction.url`).
        router: this router's uid, by which engines echo its bookings.
        table: takes the messages.
        keys: the router's, to listen only to engines that have theirs.
        metrics: counts messages and tells how long engines have been silent.
        listener: gets every message that went into the table.
        clock: seconds; the one that the table's times are on.

    Raises:
        OSError: others may open the sockets' folder.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        router: str,
        table: Table,
        keys: Keys | None = None,
        metrics: RouterMetrics | None = None,
        listener: Callable[[EngineMessage], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        for url in urls:
            transport.check_private(url.rpartition("/")[0])
        self._router = router
        self._table = table
        self._metrics = metrics
        self._listener = listener
        self._clock = clock
        self._looked_s = -math.inf
        self._heard: list[Heard | None] = [None] * len(urls)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        # ZeroMQ's own limit is 1,023.
        self._context.set(zmq.MAX_SOCKETS, len(urls) + 16)
        self._sockets = [self._connect(url, keys) for url in urls]
        self._signals = select.epoll()
        self._rank_of = {ear.FD: rank for rank, ear in enumerate(self._sockets)}
        for fd in self._rank_of:
            self._signals.register(fd, select.EPOLLIN)
        #: Engines that had said more than was read at once.
        self._unread: set[int] = set()

    def refresh(self) -> None:
        """Read what came in, unless that was done a moment ago."""
        now_s = self._clock()
        if now_s - self._looked_s >= FRESH_S:
            self.drain(now_s)

    def drain(self, now_s: float | None = None) -> None:
        """Read what came in, the newest message of each engine."""
        if self._signals.closed:
            return
        now_s = self._clock() if now_s is None else now_s
        self._looked_s = now_s
        ready, self._unread = self._unread, set()
        # One system call for all engines, most of which have said nothing new.
        ready.update(self._rank_of[fd] for fd, _ in self._signals.poll(0))
        for rank in ready:
            self._take(rank, now_s)

    async def run(self) -> None:
        """Keep figures and metrics fresh until cancelled."""
        while True:
            try:
                self.drain()
                self._tell_silence()
            except Exception:
                logger.exception("messages of engines could not be read")
            await asyncio.sleep(TICK_S)

    def heard(self, rank: int) -> Heard | None:
        """An engine's last message, None before the first."""
        return self._heard[rank]

    def silence_s(self, rank: int) -> float:
        """Seconds since an engine was heard; infinite when it never was."""
        last = self._heard[rank]
        return math.inf if last is None else self._clock() - last.at_s

    def describe(self) -> list[dict[str, Any]]:
        """What was heard of every engine, as plain data; `age_s` None: nothing."""
        return [self._describe(rank) for rank in range(len(self._heard))]

    def close(self) -> None:
        """Hear nothing more; again does nothing."""
        self._signals.close()
        for ear in self._sockets:
            ear.close()
        self._context.term()

    def _connect(self, url: str, keys: Keys | None) -> zmq.Socket[bytes]:
        ear = self._context.socket(zmq.SUB)
        transport.prepare(ear, url)
        # Not CONFLATE, whose reader may miss the signal that something came.
        ear.setsockopt(zmq.RCVHWM, _MOST_QUEUED)
        ear.setsockopt(zmq.MAXMSGSIZE, MOST_BYTES)
        # An engine binds its address when its model is loaded.
        ear.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        ear.setsockopt(zmq.RECONNECT_IVL_MAX, _MOST_RECONNECT_MS)
        ear.setsockopt(zmq.SUBSCRIBE, b"")
        if keys is not None:
            keys.use(ear, "router")
        ear.connect(url)
        return ear

    def _take(self, rank: int, now_s: float) -> None:
        newest = self._newest(rank)
        if newest is None:
            return
        outcome = self._hear(rank, newest, now_s)
        if self._metrics:
            self._metrics.message(rank, outcome)

    def _newest(self, rank: int) -> bytes | None:
        ear, newest = self._sockets[rank], None
        for _ in range(_MOST_QUEUED):
            try:
                newest = ear.recv(zmq.NOBLOCK)
            except zmq.Again:
                return newest
        # ZeroMQ signals again only what comes after all has been read.
        self._unread.add(rank)
        return newest

    def _hear(self, rank: int, data: bytes, now_s: float) -> str:
        """Take one message in; what came of it, in the words of the metric."""
        try:
            message = decode(data)
            if message.rank != rank:
                return "wrong_rank"
            return self._book(rank, message, now_s)
        except VersionError as error:
            logger.warning_once("engine %d: %s: not heard", rank, str(error))
            return "wrong_version"
        # The table refuses figures that contradict each other.
        except (MessageError, ValueError):
            return "garbage"

    def _book(self, rank: int, message: EngineMessage, now_s: float) -> str:
        if not hear(self._table, message, self._router, now_s):
            return "stale"
        self._heard[rank] = Heard(message, now_s)
        if self._listener is not None:
            self._listener(message)
        return "heard"

    def _tell_silence(self) -> None:
        if self._metrics:
            for rank in range(len(self._heard)):
                self._metrics.silence(rank, self.silence_s(rank))

    def _describe(self, rank: int) -> dict[str, Any]:
        last = self._heard[rank]
        if last is None:
            return {"rank": rank, "age_s": None}
        fields = msgspec.structs.asdict(last.message)
        fields["recent_steps"] = [
            msgspec.structs.asdict(step) for step in last.message.recent_steps
        ]
        fields["recent_transfers"] = [
            msgspec.structs.asdict(each) for each in last.message.recent_transfers
        ]
        return {
            **fields,
            "booking_seen": last.message.seen.get(self._router, 0),
            "age_s": self._clock() - last.at_s,
        }


def hear(table: Table, message: EngineMessage, router: str, now_s: float) -> bool:
    """Take a message into a router's table; False when it is stale.

    Args:
        router: uid of the router whose bookings the table holds.
        now_s: when it was read.

    Raises ValueError when the figures contradict each other.
    """
    return table.hear(
        message.rank,
        incarnation=message.incarnation,
        sequence=message.sequence,
        booking_seen=message.seen.get(router, 0),
        prefill_tokens=message.prefill_tokens,
        output_tokens=message.output_tokens,
        context_tokens=message.context_tokens,
        running=message.running,
        waiting=message.waiting,
        waiting_remote=message.waiting_remote,
        kv_total_blocks=message.kv_total_blocks,
        kv_free_blocks=message.kv_free_blocks,
        kv_pinned_blocks=message.kv_pinned_blocks,
        block_tokens=message.block_tokens,
        now_s=now_s,
        step_age_s=message.step_age_s,
    )
