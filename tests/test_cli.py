"""The console command."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from vllm_calrouter import cli

SMALL = ["--workload", "chat", "--rate", "4", "--duration", "5"]
PARTS = ("mean", "p50", "p95", "p99", "max")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli.main, ["simulate", *arguments])


def figures(*arguments: str) -> list[dict[str, Any]]:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


def refusal(*arguments: str) -> str:
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    return line


def test_help_imports_nothing_heavy() -> None:
    program = (
        "import sys\n"
        "from click.testing import CliRunner\n"
        "from vllm_calrouter.cli import main\n"
        "for words in ([], ['simulate'], ['calibrate'], ['bench'], ['report']):\n"
        "    assert CliRunner().invoke(main, [*words, '--help']).exit_code == 0\n"
        "heavy = {'vllm', 'torch', 'transformers', 'matplotlib'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert ran.stdout.strip() == "[]"


def test_every_command_is_there_and_helps() -> None:
    result = CliRunner().invoke(cli.main, ["--help"])
    for name, (_, line) in cli.COMMANDS.items():
        assert name in result.output
        assert line.split()[0] in result.output
        command = cli.main.get_command(click.Context(cli.main), name)
        assert command is not None
        assert command.help


def test_a_run_as_json_has_what_is_promised() -> None:
    (run,) = figures(*SMALL, "--policy", "least_loaded", "--seed", "3")
    for name in ("ttft_s", "tpot_s", "e2e_s", "pause_s"):
        assert set(run[name]) == set(PARTS)
        assert run[name]["p50"] <= run[name]["p99"] <= run[name]["max"]
    assert run["policy"] == "least_loaded"
    assert run["seed"] == 3
    assert 0 <= run["goodput"] <= 1
    assert set(run["goodput_by_class"]) == {"tight", "loose"}
    assert run["requests"] == pytest.approx(20, abs=15)
    assert run["preemptions"] == 0
    assert run["virtual_s"] > 0
    assert run["wall_s"] > 0


def test_the_same_command_gives_the_same_figures() -> None:
    first, second = (figures(*SMALL)[0] for _ in range(2))
    for run in (first, second):
        del run["wall_s"]
    assert first == second


def test_policies_are_compared_on_the_same_requests(tmp_path: Path) -> None:
    file = tmp_path / "requests.jsonl"
    several = ["--policy", "round_robin", "--policy", "least_loaded", "--seed", "1"]
    several += ["--seed", "2", "--requests-file", str(file)]
    runs = figures(*SMALL, *several)
    assert [(run["policy"], run["seed"]) for run in runs] == [
        ("round_robin", 1),
        ("round_robin", 2),
        ("least_loaded", 1),
        ("least_loaded", 2),
    ]
    records = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(records) == sum(run["requests"] for run in runs)

    def asked(policy: str) -> list[tuple[Any, ...]]:
        return [
            (r["seed"], r["arrival_s"], r["prompt_tokens"], r["slo"])
            for r in records
            if r["policy"] == policy
        ]

    assert asked("round_robin") == asked("least_loaded")


def test_a_table_without_json() -> None:
    result = run(*SMALL, "--policy", "round_robin", "--policy", "least_loaded")
    assert result.exit_code == 0
    for word in (
        "goodput",
        "TTFT",
        "round_robin",
        "least_loaded",
        "Paired with",
        "faster",
    ):
        assert word in result.stdout


def test_a_trace_is_replayed(tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    rows = "".join(f"{n},{50 + n},5\n" for n in range(20))
    file.write_text("arrival_s,input_tokens,output_tokens\n" + rows)
    trace = ("--trace", str(file), "--start", "5", "--duration", "10")
    (run,) = figures(*trace, "--rate", "20")
    assert run["requests"] == 10
    assert run["workload"] == str(file)


def test_router_options_reach_the_router() -> None:
    several = ("--policy", "length_threshold", "--prefill", "0", "--decode", "2")
    config = ("--router-config", "length_threshold_tokens=1")
    (all_long,) = figures(*SMALL, *several, *config)
    busy = all_long["busy"]
    assert busy[0] == 0 < busy[1]


def test_a_slow_engine_is_slow() -> None:
    one = ("--prefill", "0", "--decode", "1", *SMALL)
    (plain,), (slow,) = figures(*one), figures(*one, "--speed", "0=0.5")
    assert slow["ttft_s"]["p50"] > 1.5 * plain["ttft_s"]["p50"]


def test_a_router_may_take_a_slow_engine_for_a_fast_one() -> None:
    pair = ("--prefill", "0", "--decode", "2", "--policy", "calibrated", *SMALL)
    (knows,) = figures(*pair, "--speed", "0=0.2")
    (misled,) = figures(*pair, "--speed", "0=0.2", "--router-profile", "a40-qwen2.5-3b")
    assert misled["busy"][1] < knows["busy"][1]
    assert misled["ttft_s"]["p99"] > knows["ttft_s"]["p99"]


def test_a_class_is_promised_what_is_written() -> None:
    (run,) = figures(*SMALL, "--slo", "tight=1/1", "--slo", "loose=60000/60000")
    assert run["goodput_by_class"] == {"loose": 1.0, "tight": 0.0}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "say what arrives"),
        (["--workload", "chat", "--trace", "x.csv"], "one of both"),
        (["--workload", "chatt"], "did you mean 'chat'"),
        ([*SMALL, "--policy", "best"], "unknown routing policy 'best'"),
        ([*SMALL, "--profile", "h100"], "unknown profile 'h100'"),
        ([*SMALL, "--rate", "0"], "rate must be above 0"),
        ([*SMALL, "--duration", "-1"], "duration must be above 0"),
        ([*SMALL, "--slo-mix", "gold=1"], "no SLO class 'gold'"),
        ([*SMALL, "--slo-mix", "tight"], "write --slo-mix tight=1"),
        ([*SMALL, "--slo-mix", "tight=x"], "'x' is no number"),
        ([*SMALL, "--slo", "gold=175/40"], "no SLO class 'gold'"),
        ([*SMALL, "--slo", "tight=175"], "write --slo tight=175/39.7"),
        ([*SMALL, "--slo", "tight=0/40"], "`ttft_s` must be from"),
        ([*SMALL, "--router-profile", "h100"], "unknown profile 'h100'"),
        ([*SMALL, "--speed", "9=2"], "no engine '9'"),
        ([*SMALL, "--speed", "0=0"], "speed"),
        ([*SMALL, "--router-config", "nonsense=1"], "unknown key 'nonsense'"),
        ([*SMALL, "--router-config", "output_tokens=x"], "output_tokens"),
        ([*SMALL, "--router-config", "prefill=1"], "write --prefill"),
        ([*SMALL, "--router-config", "output_tokens"], "write --router-config"),
        ([*SMALL, "--router-config", "seed=3"], "write --seed"),
        ([*SMALL, "--router-config", "warm_up=false"], "no effect in a simulation"),
        ([*SMALL, "--router-config", "nixl_sleep_ms=5"], "no effect in a simulation"),
        ([*SMALL, "--router-config", "journal=x"], "write --requests-file"),
        ([*SMALL, "--router-config", "telemetry=off"], "no effect in a simulation"),
        ([*SMALL, "--router-config", "telemetry_keys=x"], "no effect"),
        ([*SMALL, "--router-config", "calibration=on"], "no effect in a simulation"),
        ([*SMALL, "--router-config", "kv_load_failure=fail"], "no effect"),
        ([*SMALL, "--router-config", "profile=x"], "write --profile"),
        ([*SMALL, "--router-config", "slo_classes={}"], "add --no-slo-targets"),
        (
            [*SMALL, "--no-slo-targets", "--router-config", "slo_classes={}"],
            "without default_slo",
        ),
        (
            [*SMALL, "--no-slo-targets", "--router-config", "admission=1"],
            "no request states its targets",
        ),
        ([*SMALL, "--router-config", "long_share=0.2"], "has no effect"),
        (
            [*SMALL, "--router-config", "order=fcfs", "--router-config", "patience=1"],
            "has no effect",
        ),
        ([*SMALL, "--router-config", "decode_max_num_seqs=65"], "raise --max-num-seqs"),
        ([*SMALL, "--prefill", "0", "--router-config", "first_token=off"], "no effect"),
        ([*SMALL, "--no-length-hints", "--length-error", "1"], "no effect"),
        ([*SMALL, "--start", "5"], "--start has no effect on a workload"),
        ([*SMALL, "--skip-too-long"], "no effect on a workload"),
        ([*SMALL, "--output", "x", "--requests-file", "y"], "drop --requests-file"),
        ([*SMALL, "--output", "/proc/no"], "cannot be written"),
        ([*SMALL, "--max-model-len", "64"], "raise --max-model-len"),
        ([*SMALL, "--kv-tokens", "100"], "more than an engine holds"),
        ([*SMALL, "--length-error", "-1"], "length error"),
        (["--trace", "missing.csv"], "cannot be read"),
        ([*SMALL, "--requests-file", "/no/such/folder/x"], "--requests-file"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(arguments: list[str], said: str) -> None:
    assert said in refusal(*arguments)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no column arrival_s, input_tokens, output_tokens"),
        ("arrival_s,input_tokens,output_tokens\n", "is empty"),
        ("arrival_s,input_tokens\n1,5\n", "no column output_tokens"),
        ("arrival_s,input_tokens,output_tokens\n1,-5,3\n", "'-5' is no length"),
        ("arrival_s,input_tokens,output_tokens\n1,5,0\n", "'0' is no length"),
        ("arrival_s,input_tokens,output_tokens\n1,5,1e99\n", "'1e99' is no length"),
        ("arrival_s,input_tokens,output_tokens\n1,99999999,3\n", "is no length"),
        ("arrival_s,input_tokens,output_tokens\n1,40000,3\n", "more than the model's"),
        ("arrival_s,input_tokens,output_tokens\n1.7e9,4,3\n", "--start 1700000000"),
    ],
)
def test_a_trace_that_cannot_be_replayed_is_one_line(
    text: str, said: str, tmp_path: Path
) -> None:
    file = tmp_path / "trace.csv"
    file.write_text(text)
    assert said in refusal("--trace", str(file))


def test_a_kept_run_is_not_made_again(tmp_path: Path) -> None:
    kept = (*SMALL, "--output", str(tmp_path))
    assert figures(*kept) == figures(*kept), "wall_s would differ"
    assert figures(*kept, "--policy", "round_robin")[0]["policy"] == "round_robin"
    assert len(list(tmp_path.glob("runs/*.json"))) == 2
    assert len(list(tmp_path.glob("requests/*.jsonl"))) == 2


def test_the_rate_of_a_goodput_is_found() -> None:
    one = ("--workload", "docs", "--duration", "5", "--prefill", "0", "--decode", "1")
    result = run(*one, "--find-rate", "0.6", "--json")
    assert result.exit_code == 0, result.output
    (line,) = result.stdout.splitlines()
    assert 0.4 < json.loads(line)["goodput"] < 0.8
    assert "goodput 0.6: " in result.stderr


@pytest.mark.parametrize("policies", [["length_threshold", "power_of_two"], ["vllm"]])
def test_the_table_fits_80_columns(policies: list[str]) -> None:
    words = [word for policy in policies for word in ("--policy", policy)]
    result = run(*SMALL, *words, "--router-config", "output_tokens=300")
    assert max(map(len, result.stdout.splitlines())) <= 80
    for heading in ("goodput", "loose", "tight", "TTFT", "TPOT", "pause"):
        assert heading in result.stdout, "no heading is cut"


def test_a_profile_with_a_mistake_is_one_line(tmp_path: Path) -> None:
    file = tmp_path / "p.json"
    file.write_text('{"schema": 1}')
    assert "model" in refusal(*SMALL, "--profile", str(file))
