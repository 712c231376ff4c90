"""CURVE keys: engines and routers know each other, strangers see and change nothing.

    python -m vllm_calrouter.keys FOLDER

makes two pairs: `engine`, which all engines share, and `router`, which all routers
share. An engine's host needs `engine.key_secret` and `router.key`, a router's host
`router.key_secret` and `engine.key`; a host of both needs all four.
"""

from __future__ import annotations

import argparse
import os
import stat
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import zmq
import zmq.auth

from vllm_calrouter.options import OptionError

Side = Literal["engine", "router"]

_OTHER: dict[Side, Side] = {"engine": "router", "router": "engine"}


@dataclass(frozen=True)
class Keys:
    """One side's own pair and the other side's public key, as Z85 text."""

    public: bytes
    secret: bytes = field(repr=False)
    other: bytes

    def use(self, plain: zmq.Socket[bytes], side: Side) -> None:
        """Make a socket talk only to who has the other pair."""
        plain.curve_publickey = self.public
        plain.curve_secretkey = self.secret
        if side == "engine":
            plain.curve_server = True
        else:
            plain.curve_serverkey = self.other


def make_keys(folder: str | os.PathLike[str]) -> None:
    """Make both pairs in a folder that only this user may open.

    Raises:
        FileExistsError: keys are there already.
    """
    place = Path(folder)
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    for side in _OTHER:
        if (there := _secret_file(place, side)).exists():
            raise FileExistsError(f"{there} exists: name another folder")
    for side in _OTHER:
        # Nobody else's before it is written: the library leaves the mode to the umask.
        _secret_file(place, side).touch(mode=0o600)
        zmq.auth.create_certificates(place, side)


def load_keys(folder: str | os.PathLike[str], side: Side) -> Keys:
    """Read what one side needs.

    Raises:
        OptionError: a key is missing, spoilt, or a secret is open to others.
    """
    place = Path(folder)
    secret_file = _secret_file(place, side)
    public, secret = _load(secret_file)
    other, _ = _load(place / f"{_OTHER[side]}.key")
    if secret is None:
        raise _wrong(secret_file, "has no secret key")
    if stat.S_IMODE(secret_file.stat().st_mode) & 0o077:
        raise OptionError(f"{secret_file} is open to others: chmod 600 {secret_file}")
    return Keys(public, secret, other)


def check_keys(folder: str, sides: Iterable[Side] = ("engine", "router")) -> None:
    """Raise OptionError unless these sides find keys that this ZeroMQ can use."""
    if not zmq.has("curve"):
        raise OptionError(
            "this ZeroMQ was built without CURVE, which "
            "--router-config.telemetry_keys needs: install pyzmq from PyPI"
        )
    for side in sides:
        load_keys(folder, side)


def _secret_file(folder: Path, side: Side) -> Path:
    return folder / f"{side}.key_secret"


def _load(file: Path) -> tuple[bytes, bytes | None]:
    try:
        public, secret = zmq.auth.load_certificate(file)
        # Raises when what it is given is no key.
        fits = (
            zmq.curve_public(secret) == public if secret else zmq.curve_public(public)
        )
    except OSError as error:
        raise _wrong(file, (error.strerror or "is not there").lower()) from None
    except (ValueError, zmq.ZMQError):
        fits = False
    if not fits:
        raise _wrong(file, "holds no key")
    return public, secret


def _wrong(file: Path, reason: str) -> OptionError:
    return OptionError(
        f"--router-config.telemetry_keys: {file} {reason}: make keys with "
        f"python -m vllm_calrouter.keys {file.parent}"
    )


def main(words: list[str] | None = None) -> None:
    """Make keys in the folder that the command line names."""
    parser = argparse.ArgumentParser(
        prog="python -m vllm_calrouter.keys", description="Make CURVE keys."
    )
    parser.add_argument("folder", metavar="FOLDER")
    folder = parser.parse_args(words).folder
    try:
        make_keys(folder)
    except OSError as error:
        sys.exit(f"error: {error}")
    print(f"made keys: vllm serve ... --router-config.telemetry_keys {folder}")


if __name__ == "__main__":
    main()
