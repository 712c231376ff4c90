"""The console command `calrouter`.

Each subcommand lives with what it runs and is imported when it is called: `calrouter
--help` imports neither vLLM nor anything heavy. A new one is a click command and a line
in `COMMANDS`.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping

import click

from vllm_calrouter import __version__

#: Name of a subcommand: where its click command is, and its line in `--help`.
COMMANDS: Mapping[str, tuple[str, str]] = {
    "simulate": (
        "vllm_calrouter.simulation.command:simulate",
        "Run a workload through the router on a cluster in virtual time.",
    ),
    "plan": (
        "vllm_calrouter.simulation.plan:plan",
        "Simulate every split of so many engines into prefill and decode.",
    ),
    "bench": (
        "vllm_calrouter.bench.command:bench",
        "Run a workload against live servers and measure it.",
    ),
    "report": (
        "vllm_calrouter.report.command:report",
        "Make a page of plots from a folder of runs.",
    ),
    "calibrate": (
        "vllm_calrouter.calibration.command:calibrate",
        "Measure what work costs on a running server's engines.",
    ),
    "explain": (
        "vllm_calrouter.explain:explain",
        "Show why a request went where it went, from a router's journal.",
    ),
}


class _Lazy(click.Group):
    """A group that imports a command when it is called, not when it is listed."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, name = COMMANDS[cmd_name][0].partition(":")
        command: click.Command = getattr(importlib.import_module(module), name)
        return command

    def format_commands(
        self, ctx: click.Context, formatter: click.HelpFormatter
    ) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


@click.group(cls=_Lazy, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="calrouter")
def main() -> None:
    """Tools around the router of vllm-calrouter.

    The router itself needs none of them: vllm serve --router-plugin calrouter.
    """


if __name__ == "__main__":
    main()
