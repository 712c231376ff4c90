"""The exhibits as data: all that they name exists."""

from __future__ import annotations

import shlex

import pytest

from benchmarks.study.exhibit import METRICS, Exhibit, command_line
from benchmarks.study.exhibits import BEYOND, EXHIBITS
from benchmarks.study.page import reading
from benchmarks.study.plots import PLOTS
from benchmarks.study.tables import MORE
from vllm_calrouter.calibration import load
from vllm_calrouter.simulation.command import (
    Setup,
    believed_costs,
    promised,
    router_options,
    simulate,
)
from vllm_calrouter.workloads import FAMILIES


def test_the_same_options_make_the_same_line() -> None:
    one = command_line({"rate": 1, "policy": "x", "router-config.order": "deadline"})
    other = command_line(
        {"router-config.order": "deadline", "policy": "x"}, {"rate": 1}
    )
    assert one == other == "--policy x --rate 1 --router-config order=deadline"


def test_later_options_count_and_flags_have_no_value() -> None:
    line = command_line({"rate": 1, "slo": ("a=1/1", "b=2/2")}, {"rate": 2, "f": True})
    assert line == "--f --rate 2 --slo a=1/1 --slo b=2/2"


@pytest.mark.parametrize("exhibit", EXHIBITS, ids=lambda one: one.name)
def test_every_run_is_one_that_the_command_takes(exhibit: Exhibit) -> None:
    for line in set(exhibit.lines({"duration": 2}, [1])):
        written = simulate.make_context("simulate", shlex.split(line)).params
        (policy,), (seed,) = written["policies"], written["seeds"]
        assert written["workload"] in FAMILIES
        names = Setup.__struct_fields__
        setup = Setup(**{name: written[name] for name in names})
        assert promised(setup, load(setup.profile)).slo["tight"].ttft_s == 0.175
        believed_costs(setup)
        assert router_options(setup, policy, seed).policy == policy


@pytest.mark.parametrize("exhibit", EXHIBITS, ids=lambda one: one.name)
def test_only_what_goes_beyond_the_study_has_an_order_or_an_early_first_token(
    exhibit: Exhibit,
) -> None:
    for point in exhibit.points:
        for name in exhibit.setups:
            line = exhibit.line({}, point, name, 1)
            written = simulate.make_context("simulate", shlex.split(line)).params
            setup = Setup(**{name: written[name] for name in Setup.__struct_fields__})
            options = router_options(setup, written["policies"][0], 1)
            beyond = name.partition(",")[0] == BEYOND
            assert options.order == ("deadline" if beyond else "fcfs")
            assert options.first_token == beyond


@pytest.mark.parametrize("exhibit", EXHIBITS, ids=lambda one: one.name)
def test_what_the_study_prints_is_of_a_run_that_is_made(exhibit: Exhibit) -> None:
    for one in exhibit.printed:
        assert one.point in exhibit.points
        assert one.setup in exhibit.setups
        assert one.metric in METRICS
    for claim in exhibit.claims:
        assert {claim.point, claim.other_point or claim.point} <= set(exhibit.points)
        assert {claim.setup, claim.other} <= set(exhibit.setups)


@pytest.mark.parametrize("exhibit", EXHIBITS, ids=lambda one: one.name)
def test_every_exhibit_is_spoken_of(exhibit: Exhibit) -> None:
    assert len(reading(exhibit.name)) > 100
    assert set(exhibit.plots) <= set(PLOTS)
    assert set(exhibit.tables) <= set(MORE)
