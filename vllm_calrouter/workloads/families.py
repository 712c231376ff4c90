"""The study's four workload families and one with longer prompts, as seeded generators.

Each stresses another resource. The study prints what each is, not its parameters:
those below are chosen so that the shipped A40 profile with 2 prefill and 4 decode
engines comes under pressure near the study's own rate (24 req/s for `mixed`).

Lengths are log-normal, cut to a range. Arrivals are a Poisson process whose rate
switches between calm and burst; its mean over the duration is the rate asked for.
"""

from __future__ import annotations

import difflib
import math
import random
from collections.abc import Mapping

import msgspec

from vllm_calrouter.workloads.arrivals import Arrival, WorkloadError

#: More would take hours to simulate; a mistake more likely than a wish.
_MOST_REQUESTS = 2_000_000


class Lengths(msgspec.Struct, frozen=True):
    """Log-normal token counts, cut to [least, most].

    `spread` is the standard deviation of the logarithm.
    """

    median: float
    spread: float
    least: int
    most: int

    def draw(self, random_: random.Random) -> int:
        tokens = random_.lognormvariate(math.log(self.median), self.spread)
        return max(self.least, min(self.most, round(tokens)))


class Kind(msgspec.Struct, frozen=True):
    """One kind of request in a family, and how often it comes."""

    weight: float
    prompt: Lengths
    output: Lengths


class Burst(msgspec.Struct, frozen=True):
    """Arrivals: `factor` times the calm rate for about a `share` of the time.

    Both states last exponentially long, bursts `mean_s` seconds.
    """

    factor: float
    share: float
    mean_s: float

    def arrivals(
        self, rate: float, duration_s: float, random_: random.Random
    ) -> list[float]:
        """Arrival times of a Poisson process in seconds.

        Its rate switches; its integral over the duration is `rate * duration_s`,
        whatever states were drawn, so that seeds differ in shape and not in load.
        """
        pieces = self._pieces(duration_s, random_)
        scale = rate * duration_s / sum(length * factor for length, factor in pieces)
        times, begin_s = [], 0.0
        for length_s, factor in pieces:
            at_s = random_.expovariate(scale * factor)
            while at_s < length_s:
                times.append(begin_s + at_s)
                at_s += random_.expovariate(scale * factor)
            begin_s += length_s
        return times

    def _pieces(
        self, duration_s: float, random_: random.Random
    ) -> list[tuple[float, float]]:
        """Lengths of the states in seconds, with their rates relative to calm."""
        calm_mean_s = self.mean_s * (1 - self.share) / self.share
        pieces, left_s, bursting = [], duration_s, random_.random() < self.share
        while left_s > 0:
            mean_s = self.mean_s if bursting else calm_mean_s
            length_s = min(left_s, random_.expovariate(1 / mean_s))
            pieces.append((length_s, self.factor if bursting else 1.0))
            left_s -= length_s
            bursting = not bursting
        return pieces


class Family(msgspec.Struct, frozen=True):
    """A workload family; `rate` in requests a second is where it is under pressure."""

    about: str
    kinds: tuple[Kind, ...]
    burst: Burst
    rate: float


_CHAT = Kind(
    1.0, Lengths(median=240, spread=0.6, least=8, most=2_000), Lengths(150, 0.6, 4, 800)
)
_DOCUMENT = Kind(
    1.0,
    Lengths(median=1_200, spread=0.4, least=400, most=8_000),
    Lengths(median=80, spread=0.5, least=4, most=400),
)
_REASONING = Kind(
    1.0,
    Lengths(median=200, spread=0.5, least=16, most=1_500),
    Lengths(median=900, spread=0.4, least=200, most=3_000),
)
_LONG_DOCUMENT = Kind(
    1.0,
    Lengths(median=3_000, spread=0.6, least=400, most=16_000),
    Lengths(median=80, spread=0.5, least=4, most=400),
)
_BURSTY = Burst(factor=2.5, share=0.2, mean_s=2.0)

FAMILIES: dict[str, Family] = {
    "mixed": Family(
        "bursts of chat turns (78 %), documents (12 %) and reasoning (10 %)",
        (
            msgspec.structs.replace(_CHAT, weight=0.78),
            msgspec.structs.replace(_DOCUMENT, weight=0.12),
            msgspec.structs.replace(_REASONING, weight=0.1),
        ),
        _BURSTY,
        24.0,
    ),
    "mixed_long": Family(
        "like mixed, its documents longer: a median of 3,000 tokens, up to 16,000",
        (
            msgspec.structs.replace(_CHAT, weight=0.78),
            msgspec.structs.replace(_LONG_DOCUMENT, weight=0.12),
            msgspec.structs.replace(_REASONING, weight=0.1),
        ),
        _BURSTY,
        14.0,
    ),
    "chat": Family(
        "chat turns alike in length: 240 tokens in, 150 out (medians, spread 0.3)",
        (
            Kind(
                1.0,
                Lengths(median=240, spread=0.3, least=8, most=2_000),
                Lengths(median=150, spread=0.3, least=4, most=800),
            ),
        ),
        _BURSTY,
        38.0,
    ),
    "docs": Family("long prompts, short answers: prefill", (_DOCUMENT,), _BURSTY, 8.0),
    "reasoning": Family(
        "short prompts, long answers: decode slots and KV", (_REASONING,), _BURSTY, 14.0
    ),
}


def generate(
    name: str,
    *,
    rate: float | None = None,
    duration_s: float = 90.0,
    seed: int = 0,
    slo_mix: Mapping[str, float] | None = None,
    burst_factor: float | None = None,
) -> list[Arrival]:
    """The arrivals of one family, the same ones for the same arguments.

    Args:
        name: one of `FAMILIES`.
        rate: mean requests a second; the family's own where None.
        duration_s: seconds of arrivals.
        seed: of the draws.
        slo_mix: weight of each SLO class; tight and loose in equal parts where None.
        burst_factor: how many times the calm rate arrives in a burst, 1 for a plain
            Poisson process; the family's own where None.

    Raises WorkloadError: unknown name, or a number that makes no sense.
    """
    if name not in FAMILIES:
        raise WorkloadError(_unknown(name))
    family = FAMILIES[name]
    rate = family.rate if rate is None else rate
    check_rate(rate)
    check_duration(duration_s)
    if rate * duration_s > _MOST_REQUESTS:
        raise WorkloadError(
            f"{rate:g} req/s for {duration_s:g} s are more than {_MOST_REQUESTS:,} "
            "requests: ask for a shorter duration"
        )
    burst = family.burst
    if burst_factor is not None:
        check_burst(burst_factor)
        burst = msgspec.structs.replace(burst, factor=burst_factor)
    # Apart from each other: another rate does not draw other lengths.
    arrivals = random.Random(f"arrivals {name} {seed}")
    lengths = random.Random(f"lengths {name} {seed}")
    classes = SloMix(slo_mix, seed)
    weights = [kind.weight for kind in family.kinds]
    made = []
    for arrival_s in burst.arrivals(rate, duration_s, arrivals):
        (kind,) = lengths.choices(family.kinds, weights)
        made.append(
            Arrival(
                arrival_s,
                kind.prompt.draw(lengths),
                kind.output.draw(lengths),
                classes.draw(),
            )
        )
    if not made:
        raise WorkloadError(
            f"nothing arrives in {duration_s:g} s at {rate:g} req/s: "
            "ask for a longer duration or a higher rate"
        )
    return made


class SloMix:
    """Draws SLO classes by weight; its own draws, whatever else is drawn."""

    def __init__(self, weights: Mapping[str, float] | None, seed: int) -> None:
        weights = {"tight": 0.5, "loose": 0.5} if weights is None else weights
        bad = [n for n, w in weights.items() if not (0 <= w < math.inf)]
        if bad or not sum(weights.values()) > 0:
            raise WorkloadError(
                "the SLO mix needs weights of 0 or more, one of them above 0: "
                f"got {dict(weights)}"
            )
        self._names = list(weights)
        self._weights = list(weights.values())
        self._random = random.Random(f"slo {seed}")

    def draw(self) -> str:
        (name,) = self._random.choices(self._names, self._weights)
        return name


def check_rate(rate: float) -> None:
    """Raises WorkloadError unless the rate is one."""
    if not 0 < rate <= 1e6:
        raise WorkloadError(f"the rate must be above 0 and at most 1e6, got {rate:g}")


def check_burst(factor: float) -> None:
    """Raises WorkloadError unless bursts can be that much denser."""
    if not 1 <= factor <= 1_000:
        raise WorkloadError(
            f"the burst factor must be from 1 (no bursts) to 1,000, got {factor:g}"
        )


def check_duration(duration_s: float) -> None:
    """Raises WorkloadError unless the duration is one."""
    if not 0 < duration_s <= 1e7:
        raise WorkloadError(
            f"the duration must be above 0 and at most 1e7 s, got {duration_s:g}"
        )


def _unknown(name: str) -> str:
    close = difflib.get_close_matches(name, FAMILIES, n=1)
    advice = f"did you mean {close[0]!r}?" if close else "known: " + ", ".join(FAMILIES)
    return f"unknown workload {name!r}: {advice}"
