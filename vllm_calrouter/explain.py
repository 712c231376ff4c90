"""Why a request went where it went, and what came of it: from a journal, as tables.

    python -m vllm_calrouter.explain JOURNAL REQUEST_ID

A candidate is `[rank, score]` under policies that count, and `{"rank", "score",
"terms": {name: seconds}}` under policies that price; both are read.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from vllm_calrouter.records import JournalFile, Record

#: Lower is better; scores this close are equal.
_SAME = 1e-12


class Candidate(NamedTuple):
    """An engine a decision could have taken; `terms` are seconds by name."""

    rank: int
    score: float
    terms: dict[str, float]


def candidates(decision: Record) -> list[Candidate]:
    """A decision's candidates in either form; what is no candidate is left out."""
    found = (_candidate(one) for one in decision.get("candidates") or ())
    return [one for one in found if one is not None]


def _candidate(one: Any) -> Candidate | None:
    if isinstance(one, dict):
        terms = {str(k): _number(v) for k, v in (one.get("terms") or {}).items()}
        return Candidate(one.get("rank", -1), _number(one.get("score")), terms)
    if isinstance(one, Sequence) and not isinstance(one, str) and len(one) == 2:
        return Candidate(one[0], _number(one[1]), {})
    return None


def _number(value: Any) -> float:
    # The journal has null for what is not finite: an engine that must not be chosen.
    return float(value) if isinstance(value, int | float) else math.inf


def why(decision: Record) -> str:
    """The decision in one sentence."""
    policy, reason = decision.get("policy"), decision.get("reason")
    found = candidates(decision)
    chosen = next((c for c in found if c.rank == decision.get("rank")), None)
    if not found:
        said = "no choice was asked for" if reason == "given" else "no scores"
        return f"{policy}: {reason} ({said})"
    if chosen is None:
        return f"{policy}: {reason} (the engine taken was not among the candidates)"
    others = [c.score for c in found if c is not chosen]
    return f"{policy}: {reason}, {_against(chosen.score, others)}"


def _against(score: float, others: list[float]) -> str:
    if not others:
        return "the only candidate"
    best = min(others)
    if abs(score - best) <= _SAME:
        equal = sum(abs(score - one) <= _SAME for one in others)
        return f"equal to {equal} other{'s' if equal > 1 else ''} at {score:.6g}"
    word = "the next best has" if score < best else "although another has"
    return f"at {score:.6g}; {word} {best:.6g}"


def decision_table(decision: Record) -> Table:
    """Every candidate with its score and every term, the chosen one marked."""
    found = candidates(decision)
    names = list(dict.fromkeys(name for one in found for name in one.terms))
    table = Table()
    table.add_column("")
    table.add_column("engine", justify="right")
    for name in names:
        table.add_column(escape(f"{name} ms"), justify="right")
    table.add_column("score", justify="right")
    for one in sorted(found, key=lambda c: (c.score, c.rank)):
        chosen = one.rank == decision.get("rank")
        table.add_row(
            "->" if chosen else "",
            str(one.rank),
            *(_ms(one.terms.get(name)) for name in names),
            f"{one.score:.6g}",
            style="bold" if chosen else None,
        )
    return table


def outcome_table(record: Record) -> Table:
    """What was predicted or promised of a request, against what came of it."""
    slo = record.get("slo") or {}
    table = Table(title="what came of it", title_justify="left")
    for name in ("", "SLO", "predicted", "actual", "predicted / actual", "kept"):
        table.add_column(name, justify="right" if name else "left")
    tokens = record.get("output_tokens")
    source = record.get("predicted_by")
    table.add_row(
        "output tokens" + (f" ({escape(str(source))})" if source else ""),
        "",
        *_compared(record.get("predicted_output_tokens"), tokens, str),
        "",
    )
    for name, target, predicted, actual in (
        ("TTFT ms", slo.get("ttft_s"), "predicted_ttft_s", record.get("ttft_s")),
        ("TPOT ms", slo.get("tpot_s"), "predicted_tpot_s", tpot_s(record)),
        ("end to end ms", None, "predicted_e2e_s", record.get("e2e_s")),
    ):
        table.add_row(
            name,
            _ms(target),
            *_compared(record.get(predicted), actual, _ms),
            _kept(target, actual),
        )
    return table


def tpot_s(record: Record) -> float | None:
    """Seconds a token after the first; None when there was no second."""
    tokens, ttft, e2e = (record.get(k) for k in ("output_tokens", "ttft_s", "e2e_s"))
    if ttft is None or e2e is None or not tokens or tokens < 2:
        return None
    return float((e2e - ttft) / (tokens - 1))


def _compared(predicted: Any, actual: Any, shown: Any) -> Iterable[str]:
    yield "" if predicted is None else shown(predicted)
    yield "" if actual is None else shown(actual)
    yield f"{predicted / actual:.2f}" if predicted is not None and actual else ""


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:.1f}"


def _kept(target: float | None, actual: float | None) -> str:
    if target is None or actual is None:
        return ""
    return "yes" if actual <= target else "NO"


def show(record: Record, console: Console) -> None:
    """Print one record."""
    slo = (record.get("slo") or {}).get("class")
    about = [
        f"request {record['request_id']}",
        f"API server {record.get('router')}",
        f"{record.get('prompt_tokens')} prompt tokens",
    ]
    if record.get("model"):
        about.append(f"model {record['model']}")
    if slo:
        about.append(f"SLO class {slo}")
    if record.get("one_leg"):
        about.append(f"one engine only ({record['one_leg']})")
    about.append(f"finish: {record.get('finish') or 'under way'}")
    console.print(escape(", ".join(about)), soft_wrap=True)
    decisions = record.get("decisions") or []
    for decision in decisions:
        line = f"{decision.get('phase')}: engine {decision.get('rank')}, "
        console.print(escape(line + why(decision)), soft_wrap=True)
        if candidates(decision):
            console.print(decision_table(decision))
    if not any(one.terms for d in decisions for one in candidates(d)):
        console.print("Scores are the policy's own counts: it prices no terms.")
    console.print(outcome_table(record))


@click.command()
@click.argument("journal", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("request_id")
def explain(journal: Path, request_id: str) -> None:
    """Show every candidate and term of a request's decisions, and what came of them.

    JOURNAL is the file of --router-config.journal, gzipped or not. REQUEST_ID is the id
    that the client got with its answer.
    """
    file = JournalFile(journal)
    found = file.of_request(request_id)
    if not found:
        raise click.ClickException(_not_found(file, request_id))
    console = Console(highlight=False)
    for record in found:
        show(record, console)
    if file.torn:
        click.echo(f"{file.torn} line(s) of the journal are torn", err=True)


def _not_found(file: JournalFile, request_id: str) -> str:
    similar = file.similar_ids(request_id)
    advice = f"similar: {', '.join(similar)}" if similar else "nothing is like it"
    return f"no request {request_id!r} in the journal ({advice})"


if __name__ == "__main__":
    explain()
