from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.calibration.test_measure import FakeServer
from vllm_calrouter import cli
from vllm_calrouter.calibration import command, load
from vllm_calrouter.calibration.measure import Measurement

A40 = load("a40-qwen2.5-3b").costs


def run(*arguments: str) -> Any:
    return CliRunner().invoke(cli.main, ["calibrate", *arguments])


def connect(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    class Connected(Measurement):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, poll_s=0.001, transport=server, **kwargs)

    monkeypatch.setattr(command, "Measurement", Connected)


def test_a_profile_is_written_that_can_be_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect(FakeServer([A40], ["both"]), monkeypatch)
    path = tmp_path / "profile.json"
    result = run("--url", "http://server", "-o", str(path))
    assert result.exit_code == 0, result.output
    profile = load(path)
    assert profile.costs.decode_base_s == pytest.approx(A40.decode_base_s, rel=0.05)
    assert set(profile.slo) == {"tight", "loose"}
    for word in ("prefill_base_s", "residual", "proposed SLO tight", str(path)):
        assert word in result.stdout.replace("\n", "")


def test_what_is_wrong_is_said_in_one_line(tmp_path: Path) -> None:
    path = str(tmp_path / "p.json")
    for arguments, says in (
        (["--url", "http://127.0.0.1:9", "-o", path], "127.0.0.1:9"),
        (["--url", "nonsense", "-o", path], "nonsense"),
        (["--url", "http://x", "-o", "/nosuch/p.json"], "no such folder"),
        (["--url", "http://x", "-o", path, "--profile", "nosuch"], "nosuch"),
        (
            ["--url", "http://x", "-o", path, "--plot", "/nosuch/p.png"],
            "no such folder",
        ),
    ):
        result = run(*arguments)
        assert result.exit_code == 2, result.output
        (line,) = result.stderr.splitlines()
        assert says in line


def test_a_plot_needs_what_draws_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command.importlib.util, "find_spec", lambda _: None)
    path = str(tmp_path / "p.json")
    result = run("--url", "http://x", "-o", path, "--plot", str(tmp_path / "p.png"))
    assert result.exit_code == 2
    assert "pip install 'vllm-calrouter[plot]'" in result.stderr


@pytest.mark.parametrize("roles", [["both"], ["prefill", "decode"]])
def test_curves_are_drawn_beside_the_points(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, roles: list[str]
) -> None:
    connect(FakeServer([A40] * len(roles), roles), monkeypatch)
    plot = tmp_path / "profile.png"
    path = str(tmp_path / "p.json")
    result = run("--url", "http://server", "-o", path, "--plot", str(plot))
    assert result.exit_code == 0, result.output
    assert plot.read_bytes().startswith(b"\x89PNG")
