"""The grid: what arrives on which engines (cells), and how it is routed (setups).

Both are words of `calrouter simulate`.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import NamedTuple

import msgspec

from vllm_calrouter.calibration import STAND_IN, load, save
from vllm_calrouter.options import RouterOptions
from vllm_calrouter.workloads import FAMILIES

#: Profiles that are wrong by a factor are written here; names of runs have the path in
#: them.
_PROFILES = Path(".cache/profiles")


_FROM_DECODE = " --router-config first_token=off"


class Cell(NamedTuple):
    """One regime.

    Fields:
        name: as tables show it.
        words: of `calrouter simulate`.
        quick: whether the quick grid has it.
        targets: whether requests state targets.
        split: whether prefill has engines of its own.
    """

    name: str
    words: str
    quick: bool = False
    targets: bool = True
    split: bool = True

    def arguments(self, setup: str) -> str:
        """The command line of a setup here, without seed and duration."""
        if not self.split:
            # There is only one engine that a first token could come from.
            setup = setup.replace(_FROM_DECODE, "")
        return f"{self.words} {setup}"


def _family(name: str, more: str = "", *, share: float = 1.0) -> str:
    """A family at a share of its own rate."""
    rate = FAMILIES[name].rate * share
    return f"--workload {name} --rate {rate:g} {more}".strip()


def wrong_profile(speed: float) -> Path:
    """The stand-in's profile with engines `speed` times as fast, as a file."""
    path = _PROFILES / f"{STAND_IN}-{speed:g}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    profile = load(STAND_IN)
    save(msgspec.structs.replace(profile, costs=profile.costs.faster(speed)), path)
    return path


#: Targets of the study, the same for prompts of any length.
_FIXED = "--slo tight=175/39.7 --slo loose=525/119.1"

_BASIC = [Cell(name, _family(name), quick=True) for name in FAMILIES]

#: At the workload's own rate these slots are not nearly enough for anybody.
_FEW_SLOTS = {
    "mixed": 0.55,
    "mixed_long": 0.9,
    "chat": 0.55,
    "docs": 1.0,
    "reasoning": 0.3,
}
_SCARCE = [
    *(
        Cell(
            f"{name}, 16 slots",
            _family(name, "--max-num-seqs 16", share=share),
            quick=name == "mixed",
        )
        for name, share in _FEW_SLOTS.items()
    ),
    *(
        Cell(
            f"{name}, 20k tokens of KV",
            _family(name, "--kv-tokens 20000"),
            quick=name == "mixed",
        )
        for name in FAMILIES
    ),
]
_SHAPES = [
    *(
        Cell(f"mixed, 2 + {n}", _family("mixed", f"--decode {n}"), quick=n == 8)
        for n in (2, 3, 6, 8)
    ),
    Cell(
        "mixed, starved 1 + 2",
        _family("mixed", "--prefill 1 --decode 2", share=0.5),
        quick=True,
    ),
    *(
        Cell(
            f"{name}, 6 that do both",
            _family(name, "--prefill 0 --decode 6"),
            quick=name == "mixed",
            split=False,
        )
        for name in ("mixed", "chat")
    ),
]
_LOADS = [
    Cell(
        f"{name}, load {share:.0%}",
        _family(name, share=share),
        quick=name == "mixed",
    )
    for share in (0.6, 1.3)
    for name in ("mixed", "chat", "docs")
] + [
    Cell(
        f"{name}, Poisson",
        _family(name, "--burst-factor 1", share=1.15),
        quick=name == "mixed",
    )
    for name in ("mixed", "chat", "docs")
]
_WISHES = [
    *(
        Cell(
            f"{name}, no targets",
            _family(name, "--no-slo-targets"),
            quick=name != "chat",
            targets=False,
        )
        for name in ("mixed", "mixed_long", "chat", "docs")
    ),
    *(
        Cell(f"{name}, fixed targets", _family(name, _FIXED), quick=name == "chat")
        for name in ("mixed", "chat", "docs")
    ),
    Cell("mixed, lengths ± 50 %", _family("mixed", "--length-error 0.5")),
    Cell("mixed, lengths ± 150 %", _family("mixed", "--length-error 1.5")),
    Cell("mixed, no lengths", _family("mixed", "--no-length-hints")),
]
_ROUTERS = [
    Cell(
        f"{name}, 6 routers, state {age} ms old",
        _family(name, f"--routers 6 --state-age-ms {age}"),
        quick=name == "mixed" and age == 50,
    )
    for name in ("mixed", "chat")
    for age in (0, 50)
]

#: Of each trace: words that cut out a window, and the rate in requests a second at
#: which round-robin's goodput is about .85.
TRACES = {
    "azure2023_code": ("--start 600 --duration 180", 1.3),
    "mooncake_conversation": ("--start 600 --duration 30 --spread 3", 0.7),
    "servegen_m_large": ("--start 600 --duration 40", 2.0),
    "servegen_deepseek_r1": ("--start 600 --duration 80", 4.0),
    "aibrix_sharegpt_8min": ("--duration 300", 18.0),
}


def wrong_profiles() -> list[Cell]:
    """Cells whose router takes the engines for others; writes their profiles."""
    return [
        Cell(
            f"{name}, engines thought {speed:g} times as fast",
            _family(name, f"--router-profile {wrong_profile(speed)}"),
            quick=name == "mixed" or speed < 1,
        )
        for name in ("mixed", "chat")
        for speed in (0.5, 2.0)
    ]


def traces(folder: Path) -> list[Cell]:
    """Cells of the recorded traces in a folder, at three loads each."""
    cells = []
    for name, (window, rate) in TRACES.items():
        for path in sorted(folder.glob(f"{name}.csv*")):
            file = shlex.quote(str(path))
            for share in (0.6, 1.0, 1.3):
                words = f"--trace {file} {window} --rate {rate * share:g}"
                words += " --skip-too-long"
                cells.append(Cell(f"{name}, load {share:.0%}", words))
    return cells


def cells(*, quick: bool = False, folder: Path | None = None) -> list[Cell]:
    """The grid's cells; with a folder of traces, theirs too."""
    made = [
        *(*_BASIC, *_SCARCE, *_SHAPES, *_LOADS, *_WISHES, *_ROUTERS),
        *wrong_profiles(),
        *(traces(folder) if folder else []),
    ]
    return [cell for cell in made if cell.quick] if quick else made


def _setup(policy: str, **config: object) -> str:
    pairs = "".join(f" --router-config {k}={v}" for k, v in config.items())
    return f"--policy {policy}{pairs}"


#: What everything is compared with: today's usual proxy.
ROUND_ROBIN = "round-robin, first token from decode"
OWN = "vLLM's own choice"
LEAST_LOADED = "least-loaded"
SHORT_FIRST = "short_first"
DEFAULT = "default"
UNBOUNDED = "default, patience null"

_DEFAULT = RouterOptions().policy
DEFAULT_PATIENCE = RouterOptions().patience
SETUPS = {
    ROUND_ROBIN: _setup("round_robin", order="fcfs") + _FROM_DECODE,
    "round-robin": _setup("round_robin", order="fcfs"),
    OWN: _setup("vllm", order="fcfs"),
    LEAST_LOADED: _setup("least_loaded", order="fcfs"),
    SHORT_FIRST: _setup(_DEFAULT, order="short_first"),
    DEFAULT: _setup(_DEFAULT),
    UNBOUNDED: _setup(_DEFAULT, patience="null"),
}

QUICK_SETUPS = (ROUND_ROBIN, OWN, LEAST_LOADED, SHORT_FIRST, DEFAULT, UNBOUNDED)

#: Round-robin with a third more engines, for what it takes to keep up with six.
EIGHT = Cell("mixed, 3 + 5", _family("mixed", "--prefill 3 --decode 5"))
