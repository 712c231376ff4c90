"""`calrouter calibrate` on real engines: it predicts, and leaves nothing behind."""

from __future__ import annotations

from pathlib import Path

from click.testing import CliRunner

from benchmarks.calibration_held_out import held_out
from tests.e2e.talk import Server
from vllm_calrouter.calibration import load
from vllm_calrouter.cli import main

#: Two cores shared by engines, server and client scatter by a fifth, and by more under
#: load; a profile of another machine is off by several times.
_MOST_ERROR = 0.5


async def test_steps_that_were_not_fitted_are_predicted(unified: Server) -> None:
    rows = await held_out(unified.cluster.url, key=unified.key, turns=3, turn_s=3)
    assert unified.settle() == ""
    assert all(row["steps"] > 50 for row in rows)
    assert max(row["median"] for row in rows) < _MOST_ERROR


def test_a_split_server_is_measured_with_its_transfers(
    split: Server, tmp_path: Path
) -> None:
    path, plot = tmp_path / "profile.json", tmp_path / "profile.png"
    found = CliRunner().invoke(
        main,
        [
            *("calibrate", "--url", split.cluster.url, "-o", str(path)),
            *("--most-seconds", "5", "--plot", str(plot)),
        ],
    )
    assert found.exit_code == 0, found.output
    profile = load(path)
    # The KV caches of a tiny model are such that a larger one may not take longer.
    assert set(profile.notes) <= {"transfer_bytes_per_s"}
    assert profile.unlike(split.state()["served"]) == ""
    assert plot.stat().st_size > 0
    assert split.settle() == ""


def test_what_does_not_generate_is_refused(pooling: Server, tmp_path: Path) -> None:
    path = str(tmp_path / "profile.json")
    said = CliRunner().invoke(
        main, ["calibrate", "--url", pooling.cluster.url, "-o", path]
    )
    assert said.exit_code == 2
    (line,) = said.stderr.splitlines()
    assert "refuses a completion" in line
