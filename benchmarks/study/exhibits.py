"""The study's exhibits as data.

Rates are those at which round-robin is losing goodput fast in this simulator, as the
study chose its own on hardware; lengths and arrivals are this project's workloads,
since the study prints no parameters of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.study.exhibit import Claim, Exhibit, Options, Printed

ROUND_ROBIN, LEAST, LENGTH = "round_robin", "least_loaded", "length_threshold"
PAPER, CALIBRATED, BEYOND = "paper", "calibrated", "beyond"

SETUPS: dict[str, Options] = {
    ROUND_ROBIN: {"policy": "round_robin"},
    LEAST: {"policy": "least_loaded"},
    LENGTH: {"policy": "length_threshold"},
    PAPER: {"policy": "paper"},
    CALIBRATED: {"policy": "calibrated"},
    BEYOND: {
        "policy": "calibrated",
        "router-config.order": "deadline",
        "router-config.first_token": "on",
    },
}

MIXED: Options = {"workload": "mixed", "rate": 20}
SATURATED: Options = {"workload": "mixed", "rate": 26}
CHAT: Options = {"workload": "chat", "rate": 40}
DOCUMENTS: Options = {"workload": "docs", "rate": 7}
REASONING: Options = {"workload": "reasoning", "rate": 13}


def _some(*names: str) -> dict[str, Options]:
    return {name: SETUPS[name] for name in names}


_SWEPT = _some(ROUND_ROBIN, LEAST, PAPER, BEYOND)

UNCALIBRATED = (Path(__file__).parent / "uncalibrated.json").relative_to(
    Path(__file__).parents[2]
)
_WRONG: Options = {"router-profile": UNCALIBRATED}


def _calibration() -> dict[str, Options]:
    setups = _some(LEAST)
    for name in (PAPER, CALIBRATED, BEYOND):
        setups[name] = SETUPS[name]
        setups[f"{name}, wrong"] = {**SETUPS[name], **_WRONG}
    return setups


def _width(decode: int) -> Options:
    return {**MIXED, "decode": decode}


def _few_slots(decode: int) -> Options:
    return {"workload": "mixed", "rate": 15, "decode": decode, "max-num-seqs": 16}


def _shape(prefill: int, decode: int) -> Options:
    return {**MIXED, "prefill": prefill, "decode": decode}


_NO_LENGTH: Options = {"no-length-hints": True}


def _without(of: str) -> dict[str, Options]:
    setup = SETUPS[of]
    rows = {
        of: setup,
        f"{of}, no length": {**setup, **_NO_LENGTH},
        f"{of}, no KV": {**setup, "router-config.kv_weight": 0},
        f"{of}, no SLO": {**setup, "no-slo-targets": True},
    }
    if of == CALIBRATED:
        rows[f"{of}, no slots"] = {**setup, "router-config.slot_weight": 0}
    return rows


#: What the study says of decode widths.
_OF_WIDTH = (
    Claim("3: tie with JSQ", "3 decode", PAPER, LEAST, -0.006, ties=True),
    Claim("4: the learned router leads JSQ", "4 decode", PAPER, LEAST, 0.029),
    Claim(
        "6: tie with round-robin",
        "6 decode",
        PAPER,
        ROUND_ROBIN,
        -0.002,
        ties=True,
    ),
)

EXHIBITS: Sequence[Exhibit] = (
    Exhibit(
        "mixed",
        "Mixed traffic",
        "Bursts of chat turns, documents and reasoning on 2 prefill + 4 decode "
        "engines; each seed is a trace of its own (the study has three).",
        {"mixed": MIXED},
        SETUPS,
        printed=(
            Printed("mixed", LEAST, "goodput", 0.835),
            Printed("mixed", LEAST, "lowest goodput", 0.795),
            Printed("mixed", PAPER, "goodput", 0.864),
            Printed("mixed", PAPER, "lowest goodput", 0.855),
            Printed("mixed", PAPER, "highest goodput", 0.877),
            Printed("mixed", PAPER, "lowest TTFT P99", 0.25),
            Printed("mixed", PAPER, "highest TTFT P99", 0.30),
        ),
        claims=(
            Claim("the learned router leads JSQ", "mixed", PAPER, LEAST, 0.029),
            Claim("it leads round-robin", "mixed", PAPER, ROUND_ROBIN, None),
            Claim("it leads the length heuristic", "mixed", PAPER, LENGTH, None),
        ),
    ),
    Exhibit(
        "calibration",
        "Right and wrong constants",
        "The router believes the engines' own constants, or the study's uncalibrated "
        "ones: a decode step 7.4 times too fast, prefill 13 times, KV a token 18 times "
        "too small.",
        {"mixed": MIXED},
        _calibration(),
        printed=(
            Printed("mixed", PAPER, "goodput", 0.864),
            Printed("mixed", f"{PAPER}, wrong", "goodput", 0.819),
            Printed("mixed", f"{PAPER}, wrong", "lowest TTFT P99", 0.42),
            Printed("mixed", f"{PAPER}, wrong", "highest TTFT P99", 0.52),
        ),
        claims=(
            Claim(
                "right constants are worth 4.5 points",
                "mixed",
                PAPER,
                f"{PAPER}, wrong",
                0.045,
            ),
            Claim(
                "with wrong ones it falls below JSQ",
                "mixed",
                LEAST,
                f"{PAPER}, wrong",
                0.016,
            ),
        ),
    ),
    Exhibit(
        "workloads",
        "Policy by workload",
        "Each family at a rate of its own.",
        {
            "mixed": MIXED,
            "chat": CHAT,
            "documents": DOCUMENTS,
            "reasoning": REASONING,
        },
        SETUPS,
        printed=(
            Printed("mixed", PAPER, "goodput", 0.864),
            Printed("chat", PAPER, "goodput", 0.760),
            Printed("chat", LENGTH, "goodput", 0.855),
            Printed("documents", ROUND_ROBIN, "goodput", 0.585),
            Printed("documents", ROUND_ROBIN, "TTFT P99", 1.1),
            Printed("reasoning", PAPER, "goodput", 0.955),
        ),
        claims=(
            Claim("chat: the heuristic leads it", "chat", LENGTH, PAPER, 0.095),
            Claim(
                "documents: JSQ leads round-robin by 11 points or more",
                "documents",
                LEAST,
                ROUND_ROBIN,
                0.110,
            ),
            Claim(
                "documents: so does the learned router",
                "documents",
                PAPER,
                ROUND_ROBIN,
                0.110,
            ),
            Claim(
                "reasoning: it leads round-robin", "reasoning", PAPER, ROUND_ROBIN, None
            ),
        ),
        tables=("ceilings",),
        plots=("by_kind",),
    ),
    Exhibit(
        "width",
        "Decode width",
        "Mixed traffic on 2 prefill engines and 2 to 8 decode engines, at one rate.",
        {f"{n} decode": _width(n) for n in (2, 3, 4, 6, 8)},
        _SWEPT,
        printed=(
            Printed("3 decode", PAPER, "goodput", 0.816),
            Printed("3 decode", LEAST, "goodput", 0.822),
            Printed("4 decode", PAPER, "goodput", 0.864),
            Printed("4 decode", LEAST, "goodput", 0.835),
            Printed("6 decode", PAPER, "goodput", 0.858),
            Printed("6 decode", ROUND_ROBIN, "goodput", 0.860),
        ),
        claims=_OF_WIDTH,
        plots=("by_point",),
    ),
    Exhibit(
        "scarce",
        "Decode width where decode is scarce",
        "Not in the study in this form: the same with 16 slots an engine instead of "
        "64, at 15 req/s, so that requests wait for decode and not for prefill. The "
        "printed figures are those of the section above.",
        {f"{n} decode": _few_slots(n) for n in (2, 3, 4, 6)},
        _some(ROUND_ROBIN, LEAST, PAPER, CALIBRATED, BEYOND),
        printed=(
            Printed("3 decode", PAPER, "goodput", 0.816),
            Printed("4 decode", PAPER, "goodput", 0.864),
            Printed("4 decode", LEAST, "goodput", 0.835),
            Printed("6 decode", PAPER, "goodput", 0.858),
        ),
        claims=(
            *_OF_WIDTH,
            Claim(
                "starved (1 + 2 there), it collapses below round-robin",
                "2 decode",
                ROUND_ROBIN,
                PAPER,
                0.388,
            ),
        ),
        plots=("by_point",),
    ),
    Exhibit(
        "engines",
        "Goodput by number of engines",
        "Mixed traffic at one rate on 3 to 8 engines.",
        {
            "1 + 2": _shape(1, 2),
            "1 + 3": _shape(1, 3),
            "2 + 3": _shape(2, 3),
            "2 + 4": _shape(2, 4),
            "3 + 4": _shape(3, 4),
            "3 + 5": _shape(3, 5),
        },
        _SWEPT,
        printed=(
            Printed("1 + 2", PAPER, "goodput", 0.292),
            Printed("1 + 2", ROUND_ROBIN, "goodput", 0.680),
            Printed("2 + 3", PAPER, "goodput", 0.823),
            Printed("2 + 4", PAPER, "goodput", 0.870),
        ),
        claims=(
            Claim(
                "starved, it collapses below round-robin",
                "1 + 2",
                ROUND_ROBIN,
                PAPER,
                0.388,
            ),
            Claim("5: it leads round-robin", "2 + 3", PAPER, ROUND_ROBIN, None),
            Claim(
                "it needs 6 for what round-robin needs 7 for",
                "2 + 4",
                PAPER,
                ROUND_ROBIN,
                0.0,
                ties=True,
                other_point="3 + 4",
            ),
        ),
        tables=("engines_saved",),
        plots=("by_point",),
    ),
    Exhibit(
        "rate",
        "Rate sweep",
        "Mixed traffic on 2 + 4 engines at rising rates.",
        {f"{n} req/s": {**MIXED, "rate": n} for n in (14, 17, 20, 23, 26)},
        _SWEPT,
        printed=(
            Printed("14 req/s", ROUND_ROBIN, "goodput", 0.880),
            Printed("26 req/s", ROUND_ROBIN, "goodput", 0.733),
            Printed("14 req/s", ROUND_ROBIN, "TTFT P99", 0.22),
            Printed("26 req/s", ROUND_ROBIN, "TTFT P99", 0.56),
        ),
        plots=("by_point",),
    ),
    Exhibit(
        "tail",
        "The tail, and a train of bursts",
        "The same runs as mixed traffic above: how long first tokens took, and what "
        "happened as time went by.",
        {"mixed": MIXED},
        _SWEPT,
        printed=(
            Printed("mixed", PAPER, "TTFT P99", 0.321),
            Printed("mixed", ROUND_ROBIN, "TTFT P99", 0.337),
            Printed("mixed", LEAST, "TTFT P99", 0.346),
        ),
        plots=("tail", "timeline"),
    ),
    Exhibit(
        "ablation",
        "Which term does the work",
        "Terms of the score switched off one at a time, at two loads as in the study "
        "and where decode is scarce. Without length hints every output is taken to be "
        "256 tokens long; without SLO no request states its targets.",
        {
            "20 req/s": MIXED,
            "26 req/s": SATURATED,
            "16 slots, 15 req/s": _few_slots(4),
        },
        {
            **_without(PAPER),
            **_without(CALIBRATED),
            BEYOND: SETUPS[BEYOND],
            f"{BEYOND}, no SLO": {**SETUPS[BEYOND], "no-slo-targets": True},
        },
        claims=tuple(
            Claim(
                f"{says}, {point}", point, f"{PAPER}, {what}", PAPER, printed, ties=ties
            )
            for says, what, figures, ties in (
                ("without length it loses", "no length", (-0.032, -0.047), False),
                ("without KV nothing changes", "no KV", (0.0, 0.0), True),
                ("without SLO", "no SLO", (-0.017, 0.037), False),
            )
            for point, printed in zip(("20 req/s", "26 req/s"), figures, strict=True)
        ),
    ),
    Exhibit(
        "predictor",
        "How good a length must be",
        "Mixed traffic; lengths known with a relative error of 0 to 150 %.",
        {
            "exact": MIXED,
            "75 %": {**MIXED, "length-error": 0.75},
            "150 %": {**MIXED, "length-error": 1.5},
        },
        _some(LENGTH, PAPER, CALIBRATED),
        printed=(
            Printed("exact", PAPER, "goodput", 0.838),
            Printed("150 %", PAPER, "goodput", 0.880),
        ),
        claims=(
            Claim(
                "an error of 150 % costs nothing",
                "150 %",
                PAPER,
                PAPER,
                0.042,
                ties=True,
                other_point="exact",
            ),
            Claim("it still leads the heuristic", "150 %", PAPER, LENGTH, None),
        ),
        plots=("by_point",),
    ),
)
