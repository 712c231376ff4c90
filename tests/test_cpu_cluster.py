"""The cluster of examples and benchmarks ends what it started."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from pathlib import Path

import psutil

_PROGRAM = """
import sys, time
from pathlib import Path
from examples.cpu_cluster import Cluster, end_servers_when_terminated

class Asleep(Cluster):
    def wait_until_healthy(self):
        print(self._process.pid, flush=True)

cluster = Asleep(Path("model"), engines=1, log=Path(sys.argv[1]))
cluster._command = ["sleep", "600"]
end_servers_when_terminated()
with cluster:
    time.sleep(600)
"""


def test_a_terminated_program_ends_its_server(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _PROGRAM, str(tmp_path / "log")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        server = psutil.Process(int(program.stdout.readline()))
        try:
            program.send_signal(signal.SIGTERM)
            assert program.wait(60) == 128 + signal.SIGTERM
            assert not server.is_running()
        finally:
            program.kill()
            with contextlib.suppress(psutil.NoSuchProcess):
                server.kill()
