"""The report of a calibration, for people."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table


def show(report: dict[str, Any], output: str) -> None:
    """Print what `command.report` found."""
    console = Console()
    console.print(_constants(report))
    console.print(_engines(report))
    for name, slo in report["slo"].items():
        console.print(
            f"proposed SLO {name}: TTFT {slo['ttft_s'] * 1e3:.1f} ms (or "
            f"{slo['ttft_prefill_multiple']:.2f} times the prompt's prefill), "
            f"TPOT {slo['tpot_s'] * 1e3:.1f} ms"
        )
    if report["not_measured"]:
        console.print(f"not measured, the prior's: {', '.join(report['not_measured'])}")
    for name, note in report["notes"].items():
        if name not in report["not_measured"]:
            console.print(f"{name}: {note}")
    if not report["complete"]:
        console.print("not every constant is known to 2 %: give it more --most-seconds")
    console.print(
        f"{report['rounds']} rounds in {report['measure_s']:.1f} s; "
        f"profile written to {output}",
        soft_wrap=True,
    )


def _constants(report: dict[str, Any]) -> Table:
    table = Table("constant", "value", "standard error")
    for name, value in report["constants"].items():
        error = report["standard_errors"].get(name)
        shown = "" if error is None else f"{error:.2g}"
        if error is not None and value:
            shown += f" ({error / value:.1%})"
        table.add_row(name, f"{value:.5g}", shown)
    return table


def _engines(report: dict[str, Any]) -> Table:
    table = Table("engine", "role", "steps", "outliers", "residual, median", "P90")
    for engine in report["engines"]:
        table.add_row(
            str(engine["rank"]),
            engine["role"],
            str(engine["steps"]),
            str(engine["outliers"]),
            f"{engine['median_abs_residual']:.2%}",
            f"{engine['p90_abs_residual']:.2%}",
        )
    return table
