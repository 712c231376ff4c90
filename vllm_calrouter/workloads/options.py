"""What arrives, as options of a command: the same for every command that runs it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import click
import msgspec

from vllm_calrouter.calibration import Profile
from vllm_calrouter.console import number, pair, several
from vllm_calrouter.workloads.arrivals import Arrival, WorkloadError, with_hints
from vllm_calrouter.workloads.families import FAMILIES, generate
from vllm_calrouter.workloads.traces import Replay, replay

_DURATION_S = 90.0

_FAMILY_HELP = "\n".join(
    f"  {name:<10} {family.about}; {family.rate:g} req/s"
    for name, family in FAMILIES.items()
)

#: Part of a command's help.
HELP = f"""\b
Workloads (--workload), with the rates at which the shipped profile's 2 + 4 engines
come under pressure:
{_FAMILY_HELP}

Or replay a recorded trace (--trace FILE): CSV, gzipped or not, with the columns
arrival_s, input_tokens, output_tokens and, for shared prefixes, hash_ids.

Goodput is the share of requests whose first token came within the TTFT target of their
SLO class and whose other tokens came within its TPOT target on average."""


class Traffic(msgspec.Struct, frozen=True, kw_only=True):
    """The options of `traffic_options` as written; times in seconds."""

    workload: str | None = None
    trace: Path | None = None
    start: float = 0.0
    duration: float | None = None
    rate: float | None = None
    spread: float = 0.0
    hash_block_tokens: int = 512
    skip_too_long: bool = False
    slo_mix: str | None = None
    slo_targets: bool = True
    length_hints: bool = True
    length_error: float = 0.0

    def describe(self) -> str:
        """In words, all that tells it from other traffic."""
        parts = [self.workload or str(self.trace)]
        if self.rate is not None:
            parts.append(f"{self.rate:g} req/s")
        if self.duration is not None:
            parts.append(f"{self.duration:g} s")
        if self.start:
            parts.append(f"from {self.start:g} s")
        if self.spread:
            parts.append(f"stamps spread over {self.spread:g} s")
        if self.skip_too_long:
            parts.append("too long ones left out")
        if self.slo_mix is not None:
            parts.append(self.slo_mix.replace(",", " "))
        if not self.slo_targets:
            parts.append("no SLO told")
        if not self.length_hints:
            parts.append("no length hints")
        elif self.length_error:
            parts.append(f"length hints off by {self.length_error:.0%}")
        return ", ".join(parts)


traffic_options = several(
    [
        click.option(
            "--workload", metavar="NAME", help=f"One of {', '.join(FAMILIES)}."
        ),
        click.option(
            "--trace", type=click.Path(path_type=Path), help="Replay this file."
        ),
        click.option(
            "--start",
            type=float,
            default=0.0,
            help="Trace: begin at this second of it.",
        ),
        click.option(
            "--duration",
            type=float,
            help=f"Seconds of arrivals; {_DURATION_S:g} for a workload, all of a "
            "trace. Of a trace, in its own time.",
        ),
        click.option(
            "--rate",
            type=float,
            help="Mean requests a second; the workload's own, or as recorded, without "
            "it.",
        ),
        click.option(
            "--spread",
            type=float,
            default=0.0,
            help="Trace: move each request later by a random part of so many seconds, "
            "for coarse stamps.",
        ),
        click.option(
            "--hash-block-tokens",
            type=click.IntRange(1),
            default=512,
            show_default=True,
            help="Trace: tokens a name in hash_ids stands for.",
        ),
        click.option(
            "--skip-too-long",
            is_flag=True,
            help="Trace: leave out requests longer than the model.",
        ),
        click.option(
            "--slo-mix",
            metavar="CLASS=WEIGHT,...",
            help="Classes of the profile by weight; tight=1,loose=1 without it.",
        ),
        click.option(
            "--slo-targets/--no-slo-targets",
            default=True,
            show_default=True,
            help="Whether clients state the targets of their class.",
        ),
        click.option(
            "--length-hints/--no-length-hints",
            default=True,
            show_default=True,
            help="Whether clients say how long their outputs will be.",
        ),
        click.option(
            "--length-error",
            type=float,
            default=0.0,
            show_default=True,
            help="Relative error of these hints (0.5: half, as a standard deviation).",
        ),
    ]
)


def make_arrivals(
    traffic: Traffic, profile: Profile, seed: int, max_model_len: int
) -> list[Arrival]:
    """What arrives in a run; raises WorkloadError, ValueError.

    Args:
        traffic: the options.
        profile: whose SLO classes requests are of.
        seed: of all draws.
        max_model_len: most tokens of a prompt and its output.
    """
    if (traffic.workload is None) == (traffic.trace is None):
        raise ValueError(
            "say what arrives: --workload NAME or --trace FILE, one of both"
        )
    mix = _slo_mix(traffic, profile)
    if traffic.trace is None:
        assert traffic.workload is not None
        _refuse_trace_options(traffic)
        arrivals = generate(
            traffic.workload,
            rate=traffic.rate,
            duration_s=_DURATION_S if traffic.duration is None else traffic.duration,
            seed=seed,
            slo_mix=mix,
        )
    else:
        how = Replay(
            start_s=traffic.start,
            duration_s=traffic.duration,
            rate=traffic.rate,
            spread_s=traffic.spread,
            prefix_block_tokens=traffic.hash_block_tokens,
            skip_over_tokens=max_model_len if traffic.skip_too_long else None,
            slo_mix=mix,
            seed=seed,
        )
        arrivals = replay(traffic.trace, how)
    _check_lengths(traffic, arrivals, max_model_len)
    if traffic.length_hints:
        return with_hints(arrivals, error=traffic.length_error, seed=seed)
    if traffic.length_error:
        raise ValueError(
            "--length-error has no effect with --no-length-hints: drop one of both"
        )
    return arrivals


def _refuse_trace_options(traffic: Traffic) -> None:
    written = {
        "--start": traffic.start != 0,
        "--spread": traffic.spread != 0,
        "--hash-block-tokens": traffic.hash_block_tokens != 512,
        "--skip-too-long": traffic.skip_too_long,
    }
    for option, is_written in written.items():
        if is_written:
            raise ValueError(
                f"{option} has no effect on a workload: drop it or replay a --trace"
            )


def _check_lengths(
    traffic: Traffic, arrivals: Sequence[Arrival], max_model_len: int
) -> None:
    for index, one in enumerate(arrivals):
        tokens = one.prompt_tokens + one.output_tokens
        if tokens > max_model_len:
            advice = "raise --max-model-len"
            if traffic.trace is not None:
                advice += " or add --skip-too-long"
            raise WorkloadError(
                f"request {index} has {one.prompt_tokens:,} + {one.output_tokens:,} "
                f"tokens, more than the model's {max_model_len:,}: {advice}"
            )


def _slo_mix(traffic: Traffic, profile: Profile) -> Mapping[str, float]:
    known = ", ".join(profile.slo)
    mix = {"tight": 1.0, "loose": 1.0}
    if traffic.slo_mix is not None:
        pairs = [pair(t, "--slo-mix", "tight=1") for t in traffic.slo_mix.split(",")]
        mix = {name: number(weight, "--slo-mix") for name, weight in pairs}
    for name in mix:
        if name not in profile.slo:
            raise ValueError(
                f"the profile has no SLO class {name!r}: write --slo-mix with its own "
                f"({known})"
            )
    return mix


def mean_rate(arrivals: Sequence[Arrival]) -> float:
    """Requests a second, from the first arrival of a run's clock to the last."""
    return len(arrivals) / max(arrivals[-1].arrival_s, 1e-9)


def digest(arrivals: Sequence[Arrival]) -> str:
    """Another one for other arrivals."""
    return hashlib.sha256(msgspec.json.encode(arrivals)).hexdigest()[:16]
