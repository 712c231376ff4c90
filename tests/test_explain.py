from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from vllm.v1.engine import FinishReason

from tests.router.requests import answer, prefilled, request, token
from vllm_calrouter.explain import candidates, explain, tpot_s, why
from vllm_calrouter.options import parse
from vllm_calrouter.router.journal import Journal
from vllm_calrouter.router.router import Router

COUNTED = {
    "phase": "decode",
    "rank": 3,
    "policy": "least_loaded",
    "reason": "fewest legs",
    "candidates": [[2, 5.0], [3, 1.0], [4, None]],
}
PRICED = {
    "phase": "prefill",
    "rank": 1,
    "policy": "priced",
    "reason": "earliest finish",
    "candidates": [
        {"rank": 0, "score": 0.9, "terms": {"queue": 0.6, "prefill": 0.3}},
        {"rank": 1, "score": 0.4, "terms": {"queue": 0.1, "prefill": 0.3}},
    ],
}
RECORD = {
    "request_id": "cmpl-abc-0",
    "router": 0,
    "prompt_tokens": 100,
    "slo": {"class": "tight", "ttft_s": 0.175, "tpot_s": 0.04},
    "predicted_output_tokens": 30,
    "predicted_by": "online",
    "output_tokens": 21,
    "decisions": [PRICED, COUNTED],
    "ttft_s": 0.2,
    "predicted_ttft_s": 0.1,
    "e2e_s": 0.7,
    "finish": "stop",
}


def run(journal: Path, request_id: str) -> Result:
    arguments = [str(journal), request_id]
    return CliRunner().invoke(explain, arguments, env={"COLUMNS": "200"})


def shown(tmp_path: Path, *records: Any, request_id: str = "cmpl-abc") -> str:
    path = tmp_path / "journal.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    result = run(path, request_id)
    assert result.exit_code == 0, result.output
    return result.output


def row(text: str, *cells: str) -> list[str]:
    """The one line that has these cells; its cells."""
    lines = [[c.strip() for c in line.split("│")] for line in text.splitlines()]
    (found,) = (line for line in lines if all(cell in line for cell in cells))
    return found


def test_both_forms_of_candidates_are_read() -> None:
    assert [(c.rank, c.score, c.terms) for c in candidates(COUNTED)] == [
        (2, 5.0, {}),
        (3, 1.0, {}),
        (4, float("inf"), {}),
    ]
    assert candidates(PRICED)[1].terms == {"queue": 0.1, "prefill": 0.3}
    mixed = {"candidates": [None, "x", [1], {"rank": 2, "score": 1, "terms": None}]}
    assert [c.rank for c in candidates(mixed)] == [2]


def test_every_term_of_every_candidate_is_shown_and_the_chosen_one_marked(
    tmp_path: Path,
) -> None:
    text = shown(tmp_path, RECORD)
    assert "queue ms" in text
    assert "prefill ms" in text
    assert row(text, "->", "100.0", "300.0", "0.4")
    assert "->" not in row(text, "600.0", "300.0", "0.9")
    assert row(text, "->", "3", "1")


def test_outcome_compares_promise_prediction_and_fact(tmp_path: Path) -> None:
    text = shown(tmp_path, RECORD)
    assert row(text, "output tokens (online)", "30", "21", "1.43")
    assert row(text, "TTFT ms", "175.0", "100.0", "200.0", "0.50", "NO")
    assert row(text, "TPOT ms", "40.0", "25.0", "yes")
    assert "SLO class tight" in text


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, "least_loaded: fewest legs, at 1; the next best has 5"),
        ({"candidates": [[2, 1.0], [3, 1.0]]}, "equal to 1 other at 1"),
        ({"candidates": [[2, 0.5], [3, 1.0]]}, "at 1; although another has 0.5"),
        ({"candidates": [[3, 1.0]]}, "the only candidate"),
        ({"candidates": [[2, 1.0]]}, "not among the candidates"),
        ({"candidates": [], "reason": "given"}, "no choice was asked for"),
        ({"candidates": None}, "no scores"),
    ],
)
def test_why_says_against_what(changes: dict[str, Any], says: str) -> None:
    assert says in why({**COUNTED, **changes})


def test_counting_policies_are_said_to_price_nothing(tmp_path: Path) -> None:
    assert "prices no terms" in shown(tmp_path, {**RECORD, "decisions": [COUNTED]})
    assert "prices no terms" not in shown(tmp_path, RECORD)


def test_a_record_of_another_version_still_explains(tmp_path: Path) -> None:
    assert "request x" in shown(tmp_path, {"request_id": "x"}, request_id="x")


def test_text_of_a_client_s_is_no_markup(tmp_path: Path) -> None:
    record = {**RECORD, "request_id": "[bold]x[/nope]", "model": "[red]m"}
    text = shown(tmp_path, record, request_id="[bold]x[/nope]")
    assert "request [bold]x[/nope]" in text
    assert "model [red]m" in text


def test_an_unknown_id_ends_in_one_line_with_the_similar_ones(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_text(json.dumps(RECORD) + "\n" + '{"request_id": "ha')
    result = run(path, "cmpl-abd")
    assert result.exit_code == 1
    assert "no request 'cmpl-abd' in the journal" in result.output
    assert "similar: cmpl-abc-0" in result.output
    assert len(result.output.splitlines()) == 1


def test_what_a_router_writes_is_explained(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    options = parse(
        {
            "prefill": 2,
            "policy": "least_loaded",
            "slo_classes": {"tight": {"ttft_ms": 175}},
        }
    )
    router = Router(options, 6, journal=Journal(path))
    asked = {"extra_args": {"slo": "tight", "output_tokens": 4}}
    router.begin(request(params=asked))
    router.answered(answer(prefilled("r")))
    router.answered(answer(token("r")))
    router.answered(answer(token("r", FinishReason.STOP)))
    router.close()
    result = run(path, "user-r")
    assert result.exit_code == 0, result.output
    assert row(result.output, "output tokens (hint)", "4", "3", "1.33")
    assert result.output.count("->") == 2
    assert "SLO class tight" in result.output


def test_tpot_needs_two_tokens() -> None:
    assert tpot_s({**RECORD, "output_tokens": 1}) is None
    assert tpot_s({**RECORD, "ttft_s": None}) is None
    assert tpot_s(RECORD) == pytest.approx(0.025)


def test_it_runs_as_a_module_without_loading_vllm(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_text(json.dumps(RECORD) + "\n")
    code = (
        "import sys; from vllm_calrouter.explain import explain;"
        f"explain([{str(path)!r}, 'cmpl-abc'], standalone_mode=False);"
        "print('vllm' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "False"
