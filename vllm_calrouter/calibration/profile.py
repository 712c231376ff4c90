"""A hardware profile: one engine's constants, what they were measured on, SLO classes.

A profile is a JSON file. `load` takes a path, or the name of a shipped one
(`profiles/NAME.json`), and refuses whatever it does not understand: a constant that is
silently another than was meant prices every placement wrongly.
"""

from __future__ import annotations

import datetime
import difflib
import math
import os
import tempfile
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import msgspec

#: Version of the file format; a file of another one is refused.
SCHEMA = 1

#: The profile that stands in where nothing was measured.
STAND_IN = "a40-qwen2.5-3b"

#: A profile is a page of text. Anything larger is another file.
_MOST_BYTES = 1_000_000


class ProfileError(ValueError):
    """A profile that cannot be used; one line that names the file and the field."""


#: The highest rate that can be written.
FASTEST_BYTES_PER_S = 1e15

#: Lowest and highest value of each constant of `EngineCosts`: wide enough for any
#: hardware and model, narrow enough to catch milliseconds written as seconds.
_BOUNDS: dict[str, tuple[float, float]] = {
    "prefill_base_s": (0.0, 60.0),
    "prefill_per_token_s": (1e-12, 1.0),
    "prefill_per_token_sq_s": (0.0, 1e-3),
    "decode_base_s": (1e-9, 60.0),
    "decode_per_seq_s": (0.0, 1.0),
    "decode_per_context_token_s": (0.0, 1e-2),
    "transfer_base_s": (0.0, 60.0),
    "transfer_bytes_per_s": (1.0, FASTEST_BYTES_PER_S),
    "kv_bytes_per_token": (1, 10**9),
    "kv_capacity_tokens": (16, 10**11),
    "far_transfer_base_s": (0.0, 60.0),
    "far_transfer_bytes_per_s": (1.0, FASTEST_BYTES_PER_S),
}


class EngineCosts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One engine's constants, in seconds, tokens and bytes.

    Prefill of a prompt with P uncached tokens:
    `prefill_base_s + prefill_per_token_s * P + prefill_per_token_sq_s * P^2`.

    One step of a decode batch of n sequences with C context tokens in all:
    `decode_base_s + decode_per_seq_s * n + decode_per_context_token_s * C`.

    Transfer of the KV cache of P tokens:
    `transfer_base_s + P * kv_bytes_per_token / transfer_bytes_per_s`, and with the
    constants of `far_transfer` where it comes from another host (None: the same).

    Raises ValueError for a constant that is not finite or outside its bounds.
    """

    prefill_base_s: float
    prefill_per_token_s: float
    prefill_per_token_sq_s: float
    decode_base_s: float
    decode_per_seq_s: float
    decode_per_context_token_s: float
    transfer_base_s: float
    transfer_bytes_per_s: float
    kv_bytes_per_token: int
    kv_capacity_tokens: int
    far_transfer_base_s: float | None = None
    far_transfer_bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        for name, (low, high) in _BOUNDS.items():
            if (value := getattr(self, name)) is not None:
                _check(name, value, low, high)

    def prefill_s(self, tokens: int) -> float:
        """Seconds to prefill `tokens` uncached prompt tokens alone, in one step."""
        return self.step_s(tokens, tokens * tokens, 0, 0)

    def step_s(
        self,
        prefill_tokens: int,
        prefill_squares: int,
        decode_seqs: int,
        decode_context_tokens: int,
    ) -> float:
        """Seconds of one engine step of any composition.

        A step reads the weights once, whatever is in it: of the two bases the larger
        counts, and all else adds up. The squares telescope, so that a prompt's chunks
        together cost its own square.

        Args:
            prefill_tokens: prompt tokens computed in this step.
            prefill_squares: sum over the chunks of end^2 - start^2, their positions in
                their prompts in tokens (attention to what came before included).
            decode_seqs: sequences that compute one token.
            decode_context_tokens: sum of these sequences' lengths, in tokens.
        """
        base = 0.0
        if prefill_tokens:
            base = self.prefill_base_s
        if decode_seqs and self.decode_base_s > base:
            base = self.decode_base_s
        return (
            base
            + self.prefill_per_token_s * prefill_tokens
            + self.prefill_per_token_sq_s * prefill_squares
            + self.decode_per_seq_s * decode_seqs
            + self.decode_per_context_token_s * decode_context_tokens
        )

    def wire_s(self, tokens: int) -> float:
        """Seconds the KV cache of `tokens` tokens occupies the link."""
        return tokens * self.kv_bytes_per_token / self.transfer_bytes_per_s

    def transfer_s(self, tokens: int) -> float:
        """Seconds to move the KV cache of `tokens` tokens over a free link."""
        return self.transfer_base_s + self.wire_s(tokens)

    def changed(self, **constants: float) -> EngineCosts:
        """The same with other constants, each moved to the nearest value that can be.

        For fits, which may end a hair below 0. Raises ValueError for one that is not
        finite.
        """
        within = {}
        for name, value in constants.items():
            low, high = _BOUNDS[name]
            within[name] = min(max(value, low), high)
        return msgspec.structs.replace(self, **within)

    def faster(self, factor: float) -> EngineCosts:
        """The same engine at `factor` times the speed; KV memory and link unchanged.

        Raises ValueError when the factor, or a constant it leads to, is absurd.
        """
        _check("speed", factor, 1e-3, 1e3)
        scaled = {name: getattr(self, name) / factor for name in SPEED}
        return msgspec.structs.replace(self, **scaled)


#: Constants that an engine's speed is in; memory and link are what they are.
SPEED = tuple(
    name
    for name in EngineCosts.__struct_fields__
    if name.startswith(("prefill", "decode"))
)


class SloClass(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one class of requests was promised.

    The TTFT target of a prompt of P tokens is
    `max(ttft_s, ttft_prefill_multiple * prefill_s(P))`: with a multiple of 0 it is
    flat, else a long prompt may take in proportion to what it costs alone.
    """

    ttft_s: float
    tpot_s: float
    ttft_prefill_multiple: float = 0.0

    def __post_init__(self) -> None:
        _check("ttft_s", self.ttft_s, 1e-6, 86_400)
        _check("tpot_s", self.tpot_s, 1e-6, 3_600)
        _check("ttft_prefill_multiple", self.ttft_prefill_multiple, 0, 10_000)

    def ttft_target_s(self, prompt_tokens: int, costs: EngineCosts) -> float:
        """Seconds to the first token that a prompt of this length was promised."""
        own_s = self.ttft_prefill_multiple * costs.prefill_s(prompt_tokens)
        return max(self.ttft_s, own_s)


class Profile(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True
):
    """Costs and promises of one model on one kind of engine.

    `notes` says in words how a constant was come by; `standard_errors` is in the
    constant's own unit. Both are keyed by names of `EngineCosts`. `role_costs` replaces
    `costs` for the engines of a role.
    """

    schema: int
    model: str
    dtype: str
    kv_dtype: str
    tensor_parallel: int
    gpu: str
    vllm: str
    date: datetime.date
    source: str
    costs: EngineCosts
    slo: dict[str, SloClass]
    role_costs: dict[Literal["prefill", "decode"], EngineCosts] = {}
    standard_errors: dict[str, float] = {}
    notes: dict[str, str] = {}

    def __post_init__(self) -> None:
        _check("schema", self.schema, SCHEMA, SCHEMA)
        _check("tensor_parallel", self.tensor_parallel, 1, 4096)
        if not self.slo:
            raise ValueError("`slo` names no class")
        for name, error in self.standard_errors.items():
            _known(name, "standard_errors")
            _check(f"standard_errors.{name}", error, 0, math.inf)
        for name in self.notes:
            _known(name, "notes")

    def unlike(self, served: Mapping[str, Any]) -> str:
        """How what is served differs from what this was measured on; empty: in nothing.

        Args:
            served: `model`, `dtype`, `kv_dtype`, `tensor_parallel`, `gpu`, worded as
                the profile's. Of a model the name counts, not whose it is or where.
        """
        differences = []
        for name in ("model", "dtype", "kv_dtype", "tensor_parallel", "gpu"):
            its, here = getattr(self, name), served[name]
            same = Path(its).name == Path(here).name if name == "model" else its == here
            if not same:
                differences.append(f"{name} {its}, here {here}")
        return "; ".join(differences)

    def costs_of(self, *, prefill: bool) -> EngineCosts:
        """The constants of an engine of one role."""
        return self.role_costs.get("prefill" if prefill else "decode", self.costs)


def load(name_or_path: str | os.PathLike[str]) -> Profile:
    """Read a shipped profile by name, or any by path; raises ProfileError."""
    name = os.fspath(name_or_path)
    text = _shipped_text(name)
    if text is None:
        text = _read(Path(name))
    try:
        return msgspec.json.decode(text, type=Profile)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProfileError(f"profile {name}: {_one_line(error)}") from None


def save(profile: Profile, path: str | os.PathLike[str]) -> None:
    """Write a profile whole or not at all; raises ProfileError."""
    target = Path(path)
    text = msgspec.json.format(msgspec.json.encode(profile), indent=2) + b"\n"
    try:
        descriptor, temporary = tempfile.mkstemp(
            dir=target.parent, prefix=f".{target.name}."
        )
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(text)
            os.chmod(temporary, 0o644)
            os.replace(temporary, target)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        raise ProfileError(f"profile {target} cannot be written: {error}") from None


def shipped() -> list[str]:
    """Names of the profiles that come with the package."""
    files = _folder().iterdir()
    return sorted(f.name[:-5] for f in files if f.name.endswith(".json"))


def _folder() -> Any:
    return resources.files("vllm_calrouter.calibration") / "profiles"


def _shipped_text(name: str) -> bytes | None:
    if name not in shipped():
        return None
    content: bytes = (_folder() / f"{name}.json").read_bytes()
    return content


def _read(path: Path) -> bytes:
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise ProfileError(f"profile {path}: larger than {_MOST_BYTES:,} bytes")
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise ProfileError(_unknown(str(path))) from None
    except (OSError, ValueError) as error:
        raise ProfileError(f"profile {path} cannot be read: {error}") from None


def _unknown(name: str) -> str:
    close = difflib.get_close_matches(name, shipped(), n=1)
    advice = f"did you mean {close[0]!r}?" if close else "write the path of a file or "
    if not close:
        advice += f"one of {', '.join(shipped())}"
    return f"unknown profile {name!r}: {advice}"


def _check(name: str, value: float, low: float, high: float) -> None:
    # Written so that NaN fails too; infinity is above every bound but infinity.
    if low <= value <= high and math.isfinite(value):
        return
    if low == high:
        raise ValueError(f"`{name}` must be {low:g}, got {value!r}")
    raise ValueError(f"`{name}` must be from {low:g} to {high:g}, got {value!r}")


def _known(name: str, where: str) -> None:
    if name not in _BOUNDS:
        raise ValueError(f"`{where}` speaks of {name!r}, which is no constant")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
