"""A real vLLM server with several engines on a machine without a GPU.

Used by the demo, the end-to-end tests and the benchmarks.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

import httpx
import psutil

#: What vLLM needs on a CPU: threads that share two cores in peace, and no network.
CPU_ENV = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_HOST_IP": "127.0.0.1",
}

#: As a class path, the executor stays in its engine's process; by its short name the
#: CPU platform replaces it with one whose workers spin.
_EXECUTOR = "vllm.v1.executor.uniproc_executor.UniProcExecutor"

#: A minute is usual; a machine busy with other things may take several.
_START_TIMEOUT_S = 900.0
_STOP_TIMEOUT_S = 20.0

_QUIET_PORTS = (20_000, 32_000)


def end_servers_when_terminated() -> None:
    """Let SIGTERM end this program as an exception does: its servers end, too."""

    def end(*_: object) -> None:
        # Once: a second one would interrupt the ending.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        sys.exit(128 + signal.SIGTERM)

    signal.signal(signal.SIGTERM, end)


class Cluster:
    """One `vllm serve`, on loopback unless told otherwise; use it as a context manager.

    Args:
        model: directory of the model.
        engines: number of data-parallel ranks.
        prefill: how many of them only run prefill; None: without the router.
        api_servers: number of API server processes.
        arguments: more arguments of `vllm serve`.
        environ: more environment variables.
        log: file that gets the server's output.
        host: the address that the server listens on.
        headless: engines only, for a server that another cluster starts.
        inside: a command that runs what follows it (`ip netns exec NAME`).
    """

    def __init__(
        self,
        model: Path,
        *,
        engines: int,
        prefill: int | None = 0,
        policy: str | None = None,
        api_servers: int = 1,
        arguments: Sequence[str] = (),
        environ: dict[str, str] | None = None,
        log: Path,
        host: str = "127.0.0.1",
        headless: bool = False,
        inside: Sequence[str] = (),
    ) -> None:
        self.port = free_port()
        self.url = f"http://{host}:{self.port}"
        self.log = log
        serves = [
            *("--host", host, "--port", str(self.port)),
            *("--api-server-count", str(api_servers)),
        ]
        self._command = [
            *inside,
            sys.executable,
            *("-m", "vllm.entrypoints.cli.main", "serve", str(model)),
            *("--served-model-name", "tiny"),
            *(["--headless"] if headless else serves),
            *("--data-parallel-size", str(engines)),
            *("--distributed-executor-backend", _EXECUTOR),
            *("--kv-cache-memory-bytes", str(256 << 20)),
            # Half precision rounds differently by batch; outputs are compared exactly.
            *("--dtype", "float32"),
            *("--block-size", "32"),
            *("--max-num-seqs", "64"),
            "--enforce-eager",
            *_router_arguments(prefill, policy),
            *arguments,
        ]
        self._environ = {
            **os.environ,
            **CPU_ENV,
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port_range(engines)),
            **(environ or {}),
        }
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the server without waiting for it."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                self._command,
                env=self._environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def wait_until_healthy(
        self, tell: Callable[[float], None] = lambda seconds: None
    ) -> None:
        """Wait for `/health`; calls `tell(seconds waited)` while it does.

        Raises:
            RuntimeError: the server ended, or is not healthy in time; with the last
                lines of its log.
        """
        began = time.monotonic()
        while (waited := time.monotonic() - began) < _START_TIMEOUT_S:
            if self._exit_code() is not None:
                raise RuntimeError(f"the server ended:\n{self.log_tail()}")
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{self.url}/health", timeout=2).status_code == 200:
                    return
            tell(waited)
            time.sleep(0.5)
        raise RuntimeError(f"no health in {waited:.0f} s:\n{self.log_tail()}")

    def wait_for_exit(self, timeout_s: float) -> int:
        """Wait until the server process has ended by itself; its exit code."""
        assert self._process is not None
        return self._process.wait(timeout_s)

    def processes(self) -> list[psutil.Process]:
        """The server and all its descendants (API servers, engines, coordinator)."""
        if self._process is None:
            return []
        with contextlib.suppress(psutil.NoSuchProcess):
            parent = psutil.Process(self._process.pid)
            return [parent, *parent.children(recursive=True)]
        return []

    def engine(self, rank: int) -> psutil.Process:
        """The process of one engine."""
        title = f"EngineCore_DP{rank}"
        return next(p for p in self.processes() if title in " ".join(p.cmdline()))

    def stop(self) -> None:
        """End the server and everything it started, by process id."""
        processes = self.processes()
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        _, alive = psutil.wait_procs(processes, timeout=_STOP_TIMEOUT_S)
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(alive, timeout=5)

    def log_tail(self, lines: int = 40) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def _exit_code(self) -> int | None:
        return None if self._process is None else self._process.poll()

    def __enter__(self) -> Cluster:
        try:
            self.start()
            self.wait_until_healthy()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


def _router_arguments(prefill: int | None, policy: str | None) -> list[str]:
    if prefill is None:
        return []
    arguments = ["--router-plugin", "calrouter"]
    if policy is not None:
        arguments += ["--router-policy", policy]
    if prefill:
        arguments += ["--router-config.prefill", str(prefill)]
        transfer = '{"kv_connector":"NixlConnector","kv_role":"kv_both"}'
        arguments += ["--kv-transfer-config", transfer]
    return arguments


def free_port() -> int:
    """A TCP port that was free on loopback a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def free_port_range(count: int) -> int:
    """The first of `count` neighbouring free ports (NIXL uses one a rank).

    Below the range that systems hand out by themselves: engines bind these only when
    they have loaded their model, and until then nobody else may be given one.
    """
    for _ in range(200):
        first = random.randrange(*_QUIET_PORTS)
        with contextlib.ExitStack() as held, contextlib.suppress(OSError):
            for port in range(first, first + count):
                held.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first
    raise RuntimeError(f"no {count} neighbouring free ports on loopback")
