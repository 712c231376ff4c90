"""Sends an engine's messages, so that no step waits for anyone.

The engine's own thread sends what is due: that takes microseconds and cannot block, as
ZeroMQ writes to the sockets in the background, while to wake another thread takes many
times as long and the GIL besides. A thread of the publisher's sends what had to be held
back for a moment, and the heartbeat of an engine that does not step.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue

import zmq
from vllm.logger import init_logger
from zmq.auth.thread import ThreadAuthenticator

from vllm_calrouter import transport
from vllm_calrouter.keys import Keys
from vllm_calrouter.messages import EngineMessage, encode

logger = init_logger("vllm.calrouter")

#: At most one message in this time, and one at least in that.
MIN_INTERVAL_S = 0.005
HEARTBEAT_S = 0.1

#: Messages to one router that may wait for its network.
_MOST_QUEUED = 16

_JOIN_S = 5.0


class Publisher:
    """Binds one address and tells whoever is connected the newest state.

    Args:
        address: as the option has it (`transport.endpoint` finds the rank's part).
        rank: whose messages these are.
        keys: the engine's, to talk only to routers that have theirs.
        min_interval_s, heartbeat_s: seconds between messages, least and most.
        clock: seconds; the one that `step_began_s` of `tell` is read from.

    Raises:
        OSError: the address cannot be bound, or others may open the socket's folder.
    """

    def __init__(
        self,
        address: str,
        rank: int,
        *,
        keys: Keys | None = None,
        min_interval_s: float = MIN_INTERVAL_S,
        heartbeat_s: float = HEARTBEAT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        transport.check_private(address)
        self._min_interval_s = min_interval_s
        self._heartbeat_s = heartbeat_s
        self._clock = clock
        self._newest: tuple[EngineMessage, float | None] | None = None
        #: One entry at most while the thread has not looked; None: the end.
        self._bell: SimpleQueue[bool | None] = SimpleQueue()
        self._rung = False
        self._closing = False
        #: A socket belongs to one thread at a time.
        self._turn = threading.Lock()
        self._sequence = 0
        self._sent_s = -math.inf
        # vLLM's sockets live in the process's own context; keys are asked for by
        # context, and must not be asked of those.
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._guard = self._admit_only(keys) if keys else None
        self._url = transport.endpoint(address, rank)
        try:
            self._socket = self._bind(keys)
        except OSError:
            self._end_context()
            raise
        self._thread = threading.Thread(
            target=self._run, name="calrouter-publisher", daemon=True
        )
        self._thread.start()

    @property
    def cpu_s(self) -> float:
        """CPU seconds that the thread has taken; only while it lives."""
        assert self._thread.ident is not None
        return time.clock_gettime(time.pthread_getcpuclockid(self._thread.ident))

    @property
    def sent(self) -> int:
        """Messages sent so far."""
        return self._sequence

    def tell(self, message: EngineMessage, step_began_s: float | None) -> None:
        """Take over the newest state; what was not sent before is forgotten.

        Args:
            message: not to be changed afterwards; this class numbers it.
            step_began_s: since when a step is under way, None when none is.
        """
        self._newest = (message, step_began_s)
        is_due = time.monotonic() - self._sent_s >= self._min_interval_s
        if is_due and self._turn.acquire(blocking=False):
            try:
                self._send()
            finally:
                self._turn.release()
        elif not self._rung:
            self._rung = True
            self._bell.put(True)

    def close(self) -> None:
        """End the thread and remove the socket; again does nothing."""
        self._closing = True
        self._bell.put(None)
        self._thread.join(_JOIN_S)
        if not self._thread.is_alive():
            self._end_context()

    def _end_context(self) -> None:
        if self._guard is not None:
            self._guard.stop()
            self._guard = None
        self._context.term()

    def _bind(self, keys: Keys | None) -> zmq.Socket[bytes]:
        publisher = self._context.socket(zmq.PUB)
        transport.prepare(publisher, self._url)
        # A router that does not keep up misses messages; each tells all there is.
        publisher.setsockopt(zmq.SNDHWM, _MOST_QUEUED)
        if keys is not None:
            keys.use(publisher, "engine")
        try:
            publisher.bind(self._url)
        except zmq.ZMQError as error:
            publisher.close()
            raise OSError(error.errno, error.strerror) from None
        return publisher

    def _admit_only(self, keys: Keys) -> ThreadAuthenticator:
        class Routers:
            @staticmethod
            def callback(domain: str, key: bytes) -> bool:
                return key == keys.other

        guard = ThreadAuthenticator(self._context)
        guard.start()
        guard.configure_curve_callback(credentials_provider=Routers)
        return guard

    def _run(self) -> None:
        try:
            while not self._closing:
                self._wait()
                with self._turn:
                    self._send()
        except Exception:
            # Routers see an engine that fell silent; requests go on.
            logger.exception("this engine can no longer tell routers what it holds")
        finally:
            with self._turn:
                self._closing = True
                self._socket.close()
            transport.remove_file(self._url)

    def _wait(self) -> None:
        """Until a message is due: one held back, or the heartbeat."""
        while (wait_s := self._until_heartbeat_s()) > 0.0:
            try:
                self._bell.get(timeout=min(wait_s, threading.TIMEOUT_MAX))
            except Empty:
                continue
            break
        wait_s = self._min_interval_s - self._since_sent_s()
        if wait_s > 0.0 and not self._closing:
            time.sleep(wait_s)
        # Before the state is read: what comes later rings again.
        self._rung = False

    def _until_heartbeat_s(self) -> float:
        nothing_yet = self._newest is None
        return self._heartbeat_s - (0.0 if nothing_yet else self._since_sent_s())

    def _since_sent_s(self) -> float:
        return time.monotonic() - self._sent_s

    def _send(self) -> None:
        """Send the newest state; call it in turn."""
        if self._newest is None or self._closing:
            return
        self._sent_s = time.monotonic()
        message, step_began_s = self._newest
        self._sequence += 1
        message.sequence = self._sequence
        message.step_age_s = (
            0.0 if step_began_s is None else max(0.0, self._clock() - step_began_s)
        )
        # Never blocks: a full pipe drops.
        self._socket.send(encode(message), zmq.NOBLOCK)
