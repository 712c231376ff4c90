from benchmarks.overhead import quantiles_us, router_times


def test_quantiles_are_microseconds() -> None:
    assert quantiles_us([n * 1e-6 for n in range(101)]) == {"p50": 50.0, "p99": 99.0}


def test_a_split_router_hands_over_and_a_unified_one_does_not() -> None:
    assert set(router_times(0, 2, 20)) == {"begin_us", "end_us"}
    assert set(router_times(2, 6, 20)) == {"begin_us", "hand_over_us", "end_us"}
