"""The most goodput that any policy and any order could have."""

from __future__ import annotations

from benchmarks.study.exhibit import Options
from vllm_calrouter.calibration import STAND_IN, EngineCosts, load
from vllm_calrouter.workloads import generate


def ceiling(options: Options, *, early: bool) -> float:
    """Share of a workload's requests whose first token would be in time on a cluster
    that is theirs alone.

    Args:
        options: of a run, with flat targets (`--slo`) and a seed.
        early: the first token comes from the prefill engine; otherwise the KV cache is
            moved first, and one decode step makes it.
    """
    costs = load(STAND_IN).costs
    targets_s = dict(map(_ttft_target, options["slo"]))
    arrivals = generate(
        options["workload"],
        rate=options["rate"],
        duration_s=options["duration"],
        seed=options["seed"],
    )
    in_time = 0
    for one in arrivals:
        first_s = costs.prefill_s(one.prompt_tokens)
        if not early:
            first_s += _decode_s(costs, one.prompt_tokens)
        in_time += first_s <= targets_s[one.slo]
    return in_time / len(arrivals)


def _ttft_target(slo: str) -> tuple[str, float]:
    """Of `tight=175/39.7`: the name, and 0.175 s."""
    name, _, targets = slo.partition("=")
    return name, float(targets.partition("/")[0]) / 1e3


def _decode_s(costs: EngineCosts, prompt_tokens: int) -> float:
    return costs.transfer_s(prompt_tokens) + costs.step_s(0, 0, 1, prompt_tokens)
