from __future__ import annotations

import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from vllm_calrouter import cli
from vllm_calrouter.report.groups import grouped, per_second

SETUPS = ("round_robin", "calibrated")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two policies, two seeds, simulated."""
    path = tmp_path_factory.mktemp("runs") / "<b>chat"
    words = ["--workload", "chat", "--rate", "12", "--duration", "4"]
    words += [word for name in SETUPS for word in ("--policy", name)]
    words += ["--seed", "1", "--seed", "2", "--output", str(path)]
    made = CliRunner().invoke(cli.main, ["simulate", *words])
    assert made.exit_code == 0, made.output
    return path


def report(*words: str | Path) -> Result:
    return CliRunner().invoke(cli.main, ["report", *map(str, words)])


class Page(HTMLParser):
    """What a browser would fetch, and what it would show."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.fetched: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        where = {"src", "href", "xlink:href", "srcset", "action"}
        self.fetched += [v for name, v in attrs if name in where and v]

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_needs_nothing_from_elsewhere(folder: Path) -> None:
    result = report(folder)
    assert result.exit_code == 0, result.output
    text = (folder / "report.html").read_text()
    page = Page(text)
    assert all(where.startswith("#") for where in page.fetched)
    assert not {"script", "link", "iframe", "img", "b"} & set(page.tags)
    assert "@import" not in text
    assert not re.search(r"url\((?!#)", text)


def test_the_page_shows_every_setup_and_five_plots(folder: Path) -> None:
    report(folder)
    page = Page((folder / "report.html").read_text())
    assert page.tags.count("svg") == 5
    for word in (*SETUPS, "simulated", "TTFT, ms", "TPOT, ms", "share of legs"):
        assert word in page.text
    assert "less that of round_robin" in page.text


def test_plots_take_the_page_s_colours(folder: Path) -> None:
    report(folder)
    text = (folder / "report.html").read_text()
    assert "#010203" not in text
    assert "currentColor" in text
    assert "#000000" not in text


def test_the_same_runs_make_the_same_page(folder: Path, tmp_path: Path) -> None:
    pages = [tmp_path / "a.html", tmp_path / "b.html"]
    for page in pages:
        report(folder, "--html", page)
    assert pages[0].read_text() == pages[1].read_text()


def test_another_setup_can_be_what_is_paired_with(folder: Path) -> None:
    report(folder, "--base", "calibrated")
    text = Page((folder / "report.html").read_text()).text
    assert "less that of calibrated" in text
    result = report(folder, "--base", "nosuch")
    assert result.exit_code == 2
    assert "no run is called 'nosuch'" in result.stderr


def test_a_folder_without_runs_is_one_line(tmp_path: Path) -> None:
    result = report(tmp_path / "nothing")
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("calrouter report: error: no runs in")


def test_without_matplotlib_it_says_what_to_install(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = report(folder)
    assert result.exit_code == 2
    assert 'pip install "vllm-calrouter[plot]"' in result.stderr


def a_run(name: str, seed: int, goodput: float, **more: Any) -> dict[str, Any]:
    one = {"kind": "simulated", "scenario": "s", "name": name, "seed": seed}
    one |= dict.fromkeys(("preemptions", "refused", "failed"), 0)
    one |= {key: {} for key in ("ttft_s", "tpot_s", "pause_s", "legs_by_engine")}
    return {**one, "goodput": goodput, "goodput_by_class": {"tight": goodput}, **more}


def test_gains_are_taken_seed_by_seed() -> None:
    runs = [a_run("a", 1, 0.5), a_run("a", 2, 0.9), a_run("b", 1, 0.6)]
    runs += [a_run("b", 2, 1.0), a_run("b", 3, 0.0)]
    (group,) = grouped((run, []) for run in runs)
    first, second = group.setups
    assert group.gain(first) is None
    mean, error = group.gain(second) or (0, 0)
    assert mean == pytest.approx(0.1), "seed 3 has no partner"
    assert error == pytest.approx(0.0, abs=1e-12)


def test_a_run_of_another_version_is_told() -> None:
    older = a_run("a", 1, 0.5)
    del older["refused"]
    with pytest.raises(ValueError, match="a run without refused"):
        grouped([(older, [])])


def test_only_runs_of_one_kind_and_scenario_are_put_side_by_side() -> None:
    runs = [
        a_run("a", 1, 0.5),
        a_run("b", 1, 0.5, kind="measured"),
        a_run("c", 1, 0.5, scenario="t"),
        a_run("d", 1, 0.5),
    ]
    groups = grouped((run, []) for run in runs)
    names = [[setup.name for setup in group.setups] for group in groups]
    assert names == [["a", "d"], ["b"], ["c"]]


def test_seconds_in_which_nobody_came_are_shown() -> None:
    requests = [
        {"arrival_s": 0.1, "ttft_s": 0.2},
        {"arrival_s": 0.9, "ttft_s": 0.4},
        {"arrival_s": 2.5, "ttft_s": None},
    ]
    assert per_second(requests, "ttft_s") == [
        (0, 2, pytest.approx(0.3)),
        (1, 0, None),
        (2, 1, None),
    ]
