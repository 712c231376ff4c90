"""`calrouter bench` against a server that answers like vLLM."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web
from click.testing import CliRunner, Result

from tests.bench.fake import Fake, serving
from vllm_calrouter import cli
from vllm_calrouter.calibration import SloClass, load, save

ARRIVALS = [(0.0, 20, 5), (0.1, 700, 1), (0.15, 33, 12), (0.4, 5, 3)]


@pytest.fixture
def fake() -> Iterator[Fake]:
    with serving(Fake()) as one:
        yield one


@pytest.fixture
def trace(tmp_path: Path) -> str:
    rows = [f"{at},{prompt},{output}" for at, prompt, output in ARRIVALS]
    file = tmp_path / "trace.csv"
    file.write_text("\n".join(["arrival_s,input_tokens,output_tokens", *rows]))
    return str(file)


@pytest.fixture
def patient(tmp_path: Path) -> str:
    """A profile whose classes are kept on any machine."""
    profile = load("a40-qwen2.5-3b")
    slo = {name: SloClass(ttft_s=3600.0, tpot_s=3600.0) for name in profile.slo}
    file = tmp_path / "patient.json"
    save(msgspec.structs.replace(profile, slo=slo), file)
    return str(file)


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "runs"


def bench(*words: str | Path) -> Result:
    return CliRunner().invoke(cli.main, ["bench", *map(str, words)])


def figures(*words: str | Path) -> list[dict[str, Any]]:
    result = bench(*words, "--json")
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


def requests(output: Path) -> list[dict[str, Any]]:
    lines = [file.read_text().splitlines() for file in output.glob("requests/*.jsonl")]
    return [json.loads(line) for each in lines for line in each]


def refusal(*words: str | Path) -> str:
    result = bench(*words)
    assert result.exit_code == 2, result.output
    (line,) = result.stderr.splitlines()
    assert line.startswith("calrouter bench: error: ")
    return line


def test_it_has_the_figures_of_a_simulation(
    fake: Fake, trace: str, output: Path
) -> None:
    (run,) = figures("--url", fake.url, "--trace", trace, "--output", output)
    simulated = CliRunner().invoke(
        cli.main, ["simulate", "--trace", trace, "--policy", "least_loaded", "--json"]
    )
    assert set(json.loads(simulated.stdout)) - set(run) == {"busy"}
    assert run["kind"] == "measured"
    assert run["name"] == run["policy"] == "least_loaded"
    assert run["requests"] == len(ARRIVALS)
    assert run["failed"] == 0
    assert run["preemptions"] == 0, "what was before is not this run's"
    assert run["legs_by_engine"] == {"prefill": {"0": 4}, "decode": {"1": 2, "2": 2}}
    assert fake.ttft_s < run["ttft_s"]["p50"]
    # On a busy machine tokens come in bunches, but never before they were sent.
    assert fake.ttft_s + 11 * fake.tpot_s < run["e2e_s"]["max"]


def test_requests_are_what_the_workload_says(
    fake: Fake, trace: str, output: Path
) -> None:
    bench("--url", fake.url, "--trace", trace, "--output", output)
    asked = [(len(body["prompt"]), body["max_tokens"]) for body in fake.streamed]
    assert sorted(asked) == sorted((prompt, out) for _, prompt, out in ARRIVALS)
    for body in fake.streamed:
        assert body["ignore_eos"]
        assert body["vllm_xargs"]["output_tokens"] == body["max_tokens"]
        assert round(body["vllm_xargs"]["slo_tpot_ms"], 3) in (39.7, 119.1)
    assert len({body["cache_salt"] for body in fake.streamed}) == 1
    written = sorted(requests(output), key=lambda one: one["request"])
    assert [one["output_tokens"] for one in written] == [5, 1, 12, 3]
    assert [one["decode_rank"] for one in written] == [1, 2, 1, 2]


def test_with_a_slow_down_times_are_those_of_the_hardware(
    fake: Fake, trace: str, output: Path
) -> None:
    fake.ttft_s = 0.4
    paced = ("--slow-down", "4", "--output", output)
    (run,) = figures("--url", fake.url, "--trace", trace, *paced)
    assert run["kind"] == "paced"
    records = requests(output)
    assert min(one["ttft_s"] for one in records) > 0.4 / 4
    assert max(one["ttft_s"] for one in records) < run["wall_s"] / 4
    assert run["wall_s"] == pytest.approx(4 * run["virtual_s"])
    assert run["wall_s"] > 4 * ARRIVALS[-1][0]
    targets = {round(b["vllm_xargs"]["slo_tpot_ms"], 3) for b in fake.streamed}
    assert targets <= {4 * 39.7, 4 * 119.1}


def test_a_server_s_delay_does_not_hold_the_next_requests_back(
    fake: Fake, trace: str, output: Path
) -> None:
    fake.ttft_s = 1.5
    bench("--url", fake.url, "--trace", trace, "--output", output)
    assert fake.most_at_once == len(ARRIVALS)


def test_time_that_a_request_is_held_back_counts(
    fake: Fake, trace: str, output: Path
) -> None:
    fake.ttft_s = 0.6
    bounded = ("--max-in-flight", "1", "--output", output)
    (run,) = figures("--url", fake.url, "--trace", trace, *bounded)
    assert fake.most_at_once == 1
    assert run["held_back"] == 3
    assert run["ttft_s"]["max"] > 4 * 0.6 - ARRIVALS[-1][0]


def test_every_server_gets_the_same_requests_seed_by_seed(
    trace: str, output: Path
) -> None:
    with serving(Fake()) as one, serving(Fake()) as other:
        urls = ("--url", f"old={one.url}", "--url", f"new={other.url}")
        seeds = ("--seed", "3", "--seed", "4", "--output", output)
        runs = figures(*urls, "--trace", trace, *seeds)
        assert [(run["seed"], run["name"]) for run in runs] == [
            (3, "old"),
            (3, "new"),
            (4, "old"),
            (4, "new"),
        ]
        prompts = [sorted(b["prompt"] for b in fake.streamed) for fake in (one, other)]
    assert prompts[0] == prompts[1]
    assert one.resets >= 2


def test_a_complete_run_is_not_run_again(fake: Fake, trace: str, output: Path) -> None:
    words = ("--url", fake.url, "--trace", trace, "--output", output)
    first = figures(*words)
    sent = len(fake.streamed)
    assert figures(*words) == first
    assert len(fake.streamed) == sent
    both = figures(*words, "--seed", "1", "--seed", "2")
    assert both[0] == first[0]
    assert len(fake.streamed) == 2 * sent


def test_a_run_that_was_killed_is_run_again(
    fake: Fake, trace: str, output: Path
) -> None:
    words = ("--url", fake.url, "--trace", trace, "--output", output)
    figures(*words)
    sent = len(fake.streamed)
    (file,) = output.glob("runs/*.json")
    file.unlink()
    figures(*words)
    assert len(fake.streamed) == 2 * sent
    assert len(requests(output)) == len(ARRIVALS)


def test_failures_are_counted_and_said(
    fake: Fake, trace: str, patient: str, output: Path
) -> None:
    fake.refuses = lambda number: number % 2 == 1
    words = ("--trace", trace, "--profile", patient, "--output", output)
    (run,) = figures("--url", fake.url, *words)
    assert run["failed"] == 2
    assert run["errors"] == ["error: 400: no such thing"]
    assert run["goodput"] == 0.5
    fake.refuses = lambda number: True
    assert "all requests failed" in refusal("--url", fake.url, *words, "--seed", "2")


def test_who_is_not_admitted_has_not_failed(
    fake: Fake, trace: str, patient: str, output: Path
) -> None:
    fake.refuses, fake.refusal = lambda number: number == 0, web.HTTPTooManyRequests
    words = ("--trace", trace, "--profile", patient, "--output", output)
    (run,) = figures("--url", fake.url, *words)
    assert (run["refused"], run["failed"], run["goodput"]) == (1, 0, 0.75)


def test_a_run_is_not_lost_with_the_decisions(
    fake: Fake, trace: str, output: Path
) -> None:
    fake.secretive = True
    (run,) = figures("--url", fake.url, "--trace", trace, "--output", output)
    assert run["failed"] == 0
    assert [one["decode_rank"] for one in requests(output)] == [None] * len(ARRIVALS)


def test_a_server_without_the_router_can_be_measured(
    fake: Fake, trace: str, output: Path
) -> None:
    fake.policy, fake.dev = None, False
    result = bench("--url", f"plain={fake.url}", "--trace", trace, "--output", output)
    assert result.exit_code == 0
    assert "plain does not offer /reset_prefix_cache" in result.stderr
    assert "plain" in result.stdout


def test_the_rate_of_a_goodput_is_found(fake: Fake, patient: str, output: Path) -> None:
    fake.ttft_s = fake.tpot_s = 0.0
    fake.refuses = lambda number: number >= 12
    words = ("--workload", "chat", "--rate", "30", "--duration", "0.5")
    search = ("--find-rate", "0.5", "--profile", patient, "--output", output)
    result = bench("--url", fake.url, *words, *search, "--json")
    assert result.exit_code == 0, result.output
    assert "goodput 0.5: " in result.stderr
    assert 0.4 < json.loads(result.stdout)["goodput"] < 0.6


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ({"running": 3}, "serving 3 other request"),
        ({"cold_pairs": 1}, "has warmed 1 of 2 prefill-decode pairs"),
        ({"missing_tokens": 1}, "asked for 1 + 2 tokens and gave 1 + 1"),
        ({"wavers": True}, "two texts for one greedy request"),
    ],
)
def test_a_server_that_is_not_right_is_not_measured(
    fake: Fake, trace: str, output: Path, fault: dict[str, Any], said: str
) -> None:
    for name, value in fault.items():
        setattr(fake, name, value)
    assert said in refusal("--url", fake.url, "--trace", trace, "--output", output)
    assert not fake.streamed


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--workload", "nosuch"], "unknown workload"),
        (["--workload", "chat", "--rate", "0"], "rate must be above 0"),
        (["--workload", "chat", "--profile", "h100"], "unknown profile"),
        (["--workload", "chat", "--model", "other"], "does not serve 'other'"),
        ([], "say what arrives"),
    ],
)
def test_a_mistake_is_one_line(fake: Fake, words: list[str], said: str) -> None:
    assert said in refusal("--url", fake.url, *words)


def test_an_address_that_is_none_is_one_line(fake: Fake) -> None:
    chat = ("--workload", "chat")
    assert "write [NAME=]http://" in refusal("--url", "localhost:8000", *chat)
    twice = ("--url", f"a={fake.url}", "--url", f"a={fake.url}")
    assert "a is there twice" in refusal(*twice, *chat)
    same = ("--url", fake.url, "--url", fake.url + "/")
    assert "give each a name" in refusal(*same, *chat)
    assert "does not answer" in refusal("--url", "http://127.0.0.1:9", *chat)
