"""The page itself: no scripts, no network, light or dark as its reader has it."""

from __future__ import annotations

from collections.abc import Sequence

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from vllm_calrouter.report import plots
from vllm_calrouter.report.groups import Group

#: What each kind of run is, for who did not make it.
_KINDS = {
    "simulated": "simulated: vLLM's scheduler in virtual time, no hardware",
    "paced": "real servers whose engines are paced to a profile, times scaled back",
    "measured": "measured on a live server",
}


def page(groups: Sequence[Group], title: str) -> str:
    """HTML of these groups."""
    environment = Environment(
        loader=PackageLoader("vllm_calrouter.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["pm"] = _plus_minus
    sections = [{"group": group, "plots": _plots(group)} for group in groups]
    template = environment.get_template("page.html.j2")
    return template.render(title=title, sections=sections, kinds=_KINDS)


def _plots(group: Group) -> list[tuple[str, Markup]]:
    drawn = [
        ("Time to first token", plots.distribution(group, "ttft_s", "TTFT")),
        ("Time of an output token", plots.distribution(group, "tpot_s", "TPOT")),
        ("Bursts: arrivals (bars) and TTFT (lines)", plots.timeline(group)),
        ("Balance of prefill", plots.balance(group, "prefill")),
        ("Balance of decode", plots.balance(group, "decode")),
    ]
    # Made here, from figures: it needs no escaping.
    return [(title, Markup(svg)) for title, svg in drawn if svg]


def _plus_minus(
    value: tuple[float, float] | None, form: str = ".3f", scale: float = 1.0
) -> str:
    """Mean and standard error; the error is left out where there is none."""
    if value is None:
        return ""
    mean, error = (scale * part for part in value)
    shown = f"{mean:{form}}"
    return f"{shown} ± {error:{form.lstrip('+')}}" if error else shown
