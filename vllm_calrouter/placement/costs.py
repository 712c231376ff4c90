"""What work costs on each engine, as the core takes it, and vLLM's scheduler limits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm_calrouter._core import Costs
from vllm_calrouter.calibration import STAND_IN, EngineCosts, load

if TYPE_CHECKING:
    from vllm_calrouter.options import RouterOptions


def core_costs(costs: EngineCosts | Costs) -> Costs:
    """The same constants for the core; raises ValueError on what cannot be."""
    names = EngineCosts.__struct_fields__
    return Costs(**{name: getattr(costs, name) for name in names})


def engine_costs(options: RouterOptions, engines: int) -> list[EngineCosts]:
    """One engine's constants each, by rank, of the options' profile.

    Raises ProfileError.
    """
    profile = load(options.profile or STAND_IN)
    return [profile.costs_of(prefill=rank < options.prefill) for rank in range(engines)]


def foreign_profile(options: RouterOptions, served: Mapping[str, Any]) -> str:
    """What to know of a profile measured on something else; empty: nothing.

    Args:
        served: what runs here (`Profile.unlike`).

    Raises ProfileError.
    """
    profile = load(options.profile or STAND_IN)
    differences = profile.unlike(served)
    if not differences:
        return ""
    whose = (
        f"the profile {options.profile} was"
        if options.profile
        else f"no profile was written, and {STAND_IN} stands in, which was"
    )
    return (
        f"{whose} measured on something else ({differences}): {_then(options)}; "
        "measure these engines with calrouter calibrate, and write "
        "--router-config.profile FILE"
    )


def _then(options: RouterOptions) -> str:
    """What comes of a profile of something else."""
    if not options.listens:
        return "orders correct it by one factor, which the engines' own steps tell"
    if options.calibrates and options.telemetry != "off":
        return "what steps cost is fitted as they come, but not transfers"
    return "work is mispriced"


@dataclass(frozen=True, slots=True)
class Limits:
    """One engine's scheduler limits, by vLLM's names; its own defaults."""

    max_num_seqs: int = 128
    max_num_batched_tokens: int = 2048


def engine_limits(
    options: RouterOptions, engines: int, common: Limits | None = None
) -> list[Limits]:
    """One engine's limits each, by rank: its role's own, else what all have."""
    common = common or Limits()
    limits = []
    for rank in range(engines):
        own = options.role_limits(prefill=rank < options.prefill)
        limits.append(
            Limits(
                own.get("max_num_seqs", common.max_num_seqs),
                own.get("max_num_batched_tokens", common.max_num_batched_tokens),
            )
        )
    return limits
