from __future__ import annotations

import stat
from pathlib import Path

import pytest

from vllm_calrouter.keys import Side, check_keys, load_keys, main, make_keys
from vllm_calrouter.options import OptionError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_keys(tmp_path / "keys")
    return tmp_path / "keys"


def test_both_sides_know_each_other(folder: Path) -> None:
    check_keys(str(folder))
    engine, router = load_keys(folder, "engine"), load_keys(folder, "router")
    assert engine.other == router.public
    assert router.other == engine.public
    assert len({engine.secret, router.secret, engine.public, router.public}) == 4


def test_secrets_are_the_user_s_alone(folder: Path) -> None:
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    for secret in folder.glob("*.key_secret"):
        assert stat.S_IMODE(secret.stat().st_mode) == 0o600


def test_each_side_needs_but_its_own_secret(folder: Path) -> None:
    (folder / "router.key_secret").unlink()
    (folder / "engine.key").unlink()
    load_keys(folder, "engine")


def test_keys_are_never_overwritten(folder: Path) -> None:
    before = load_keys(folder, "engine")
    with pytest.raises(FileExistsError, match="name another folder"):
        make_keys(folder)
    assert load_keys(folder, "engine") == before


def test_a_secret_is_not_printed(folder: Path) -> None:
    keys = load_keys(folder, "engine")
    assert keys.secret.decode() not in repr(keys)


WRONG = [
    ("engine.key_secret", None, "is not there"),
    ("router.key", None, "is not there"),
    ("router.key", "", "holds no key"),
    ("router.key", 'public-key = "short"', "holds no key"),
    ("engine.key_secret", f'public-key = "{"a" * 40}"', "has no secret key"),
    (
        "engine.key_secret",
        f'public-key = "{"a" * 40}"\nsecret-key = "{"b" * 40}"',
        "holds no key",
    ),
]


@pytest.mark.parametrize(("name", "text", "says"), WRONG)
def test_a_wrong_file_is_named_with_what_to_do(
    folder: Path, name: str, text: str | None, says: str
) -> None:
    if text is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(text)
    with pytest.raises(OptionError, match="make keys with python -m") as error:
        check_keys(str(folder))
    assert f"{name} {says}" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("side", "needs"),
    [
        ("engine", ["engine.key_secret", "router.key"]),
        ("router", ["router.key_secret", "engine.key"]),
    ],
)
def test_a_host_of_one_side_needs_that_side_s_keys_only(
    folder: Path, side: Side, needs: list[str]
) -> None:
    for file in folder.iterdir():
        if file.name not in needs:
            file.unlink()
    check_keys(str(folder), [side])
    with pytest.raises(OptionError, match="is not there"):
        check_keys(str(folder))


def test_a_secret_open_to_others_is_refused(folder: Path) -> None:
    (folder / "engine.key_secret").chmod(0o644)
    with pytest.raises(OptionError, match="chmod 600"):
        check_keys(str(folder))


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="is not there"):
        check_keys(str(tmp_path / "none"))


def test_the_command_makes_keys_and_says_how_to_use_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = str(tmp_path / "new" / "keys")
    main([place])
    check_keys(place)
    assert f"--router-config.telemetry_keys {place}" in capsys.readouterr().out
    with pytest.raises(SystemExit, match=r"error: .*exists"):
        main([place])
