"""The benchmark's arithmetic, and the routers it drives, without servers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from benchmarks import overhead
from benchmarks.overhead import (
    HEADLINE,
    OFF,
    POLICIES,
    SCENES,
    Scene,
    add_times,
    arguments,
    cpu_times,
    drive,
    finish_now,
    quantiles_us,
    ratios_of,
    spread,
    summary,
    table,
    turns,
)

_ROUTER_US = {
    scene.name: {
        f"{step}_us": {"p50": 10.0, "p99": 20.0}
        for step in ("begin", "begin_cold", "hand_over", "token", "end")
    }
    for scene in SCENES
}
_CPU_S = {OFF: [0.001, 0.002], "vllm": [0.001, 0.002], "least_loaded": [0.002, 0.003]}


def test_quantiles_are_microseconds() -> None:
    assert quantiles_us(n * 1e-6 for n in range(101)) == {"p50": 50.0, "p99": 99.0}


def test_one_measurement_is_all_its_quantiles() -> None:
    assert quantiles_us([2e-6]) == {"p50": 2.0, "p99": 2.0}


def test_ratios_are_of_the_same_round() -> None:
    assert ratios_of([2.0, 3.0], [1.0, 6.0]) == [2.0, 0.5]
    with pytest.raises(ValueError, match="zip"):
        ratios_of([1.0], [1.0, 2.0])


def test_a_spread_holds_the_extremes() -> None:
    assert spread([1.5, 1.0, 1.1]) == {"median": 1.1, "min": 1.0, "max": 1.5}


def test_everybody_goes_first_second_and_last_equally_often() -> None:
    orders = list(itertools.islice(turns("abc"), 6))
    assert len(set(orders)) == 6
    for place in zip(*orders, strict=True):
        assert sorted(place) == list("aabbcc")


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.name)
def test_every_request_driven_ends(scene: Scene) -> None:
    times = drive(scene, 100, int)
    legs = {"begin": 100, "hand_over": 100 if scene.prefill else 0}
    answers = {"token": 100, "end": 100}
    assert {step: len(each) for step, each in times.items()} == legs | answers


@pytest.mark.parametrize("scene", SCENES[: len(POLICIES)], ids=lambda scene: scene.name)
def test_adding_is_timed_through_the_client(scene: Scene) -> None:
    assert len(add_times(scene, 100)) == 100


def test_a_coroutine_that_waits_is_refused() -> None:
    class Wait:
        def __await__(self):  # type: ignore[no-untyped-def]
            yield

    async def waits() -> None:
        await Wait()

    with pytest.raises(RuntimeError, match="waits"):
        finish_now(waits())


def test_the_share_is_of_the_server_without_the_plugin() -> None:
    result = summary(_ROUTER_US, _CPU_S, requests=50)
    assert result["router_share"] == pytest.approx(10 / 1500, abs=1e-5)
    assert result["requests"] == 100
    assert result["off_over_off"]["median"] == 2.0


def test_the_headline_is_the_policy_that_chooses_in_the_router() -> None:
    result = summary(_ROUTER_US, _CPU_S, requests=50)
    assert result["cpu_ratio"] == result["policies"][HEADLINE]["cpu_ratio"]
    assert result["cpu_ratio"] == {"median": 1.75, "min": 1.5, "max": 2.0}
    assert result["policies"]["vllm"]["cpu_ratio"]["max"] == 1.0


def test_the_table_has_all_steps_of_all_scenes() -> None:
    lines = table(summary(_ROUTER_US, _CPU_S, requests=50)).splitlines()
    steps = {line.split("  ")[1] for line in lines if "/   20.0" in line}
    assert steps == {"begin", "begin cold", "hand over", "token", "end"}


class StubServer:
    """A server that counts its blocks; `cluster` is itself, and has no URL."""

    url = ""

    def __init__(self, name: str) -> None:
        self.name = name
        self.cluster = self
        self.cpu_s: list[float] = []

    def block(self, requests: int) -> None:
        self.cpu_s.append(requests * 1e-3)


@pytest.mark.parametrize(("deadline_s", "blocks"), [(float("inf"), 7), (0.0, 2)])
def test_rounds_end_at_the_deadline_but_two_are_made(
    monkeypatch: pytest.MonkeyPatch, deadline_s: float, blocks: int
) -> None:
    @contextmanager
    def running(names: Sequence[str], _: float) -> Iterator[list[StubServer]]:
        yield [StubServer(name) for name in names]

    async def load(url: str, requests: int) -> None:
        pass

    monkeypatch.setattr(overhead, "running", running)
    monkeypatch.setattr(overhead, "load", load)
    times = cpu_times(7, 5, deadline_s)
    assert times == {name: [5e-3] * blocks for name in (OFF, *POLICIES)}


@pytest.mark.parametrize(
    "words", [["--requests", "0"], ["--rounds", "1"], ["--iterations", "9"]]
)
def test_too_little_to_measure_is_refused(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        arguments(words)
    assert "must be at least" in capsys.readouterr().err
