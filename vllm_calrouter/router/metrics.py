"""The router's Prometheus metrics, on the server's own `/metrics`.

The label `engine` is the rank, as in vLLM's metrics.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

from vllm_calrouter._core import Phase
from vllm_calrouter.placement import Choice

_PREFIX = "vllm:calrouter_"

#: Seconds; a choice takes microseconds, a slow one shows in the last buckets.
_DECISION_BUCKETS_S = (1e-6, 2e-6, 5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 1e-3, 1e-2)

#: Seconds; from one decode step to a long wait for a slot.
_PAUSE_BUCKETS_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)
#: Predicted / actual, denser towards 1 and symmetrical around it.
_RATIO_BUCKETS = (
    *(1 / 10, 1 / 5, 1 / 3, 1 / 2, 2 / 3, 4 / 5, 9 / 10, 1.0),
    *(10 / 9, 5 / 4, 3 / 2, 2.0, 3.0, 5.0, 10.0),
)


class RouterMetrics:
    """Counters and gauges of one API server.

    Make it after vLLM's own metrics: setting those up unregisters every `vllm:` one.
    """

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(_PREFIX + name, text, labels, registry=registry)

        def gauge(name: str, text: str, over_servers: Any, *labels: str) -> Gauge:
            return Gauge(
                _PREFIX + name,
                text,
                labels,
                registry=registry,
                multiprocess_mode=over_servers,
            )

        def histogram(
            name: str, text: str, buckets: Sequence[float], *labels: str
        ) -> Histogram:
            return Histogram(
                _PREFIX + name, text, labels, registry=registry, buckets=buckets
            )

        self._decisions = counter(
            "decisions", "Engines chosen.", "phase", "engine", "policy"
        )
        self._one_leg = counter(
            "one_leg", "Requests served whole by one engine of split pools.", "cause"
        )
        self._refused = counter(
            "refused", "Requests not let in (429), by SLO class.", "slo"
        )
        self._aborts = counter(
            "aborts", "Aborts (client gone, or stop string found).", "stage"
        )
        self._first_tokens = counter(
            "first_tokens", "First tokens sent straight from a prefill engine."
        )
        self._bypasses = counter(
            "first_token_bypasses",
            "Split requests whose first token comes from the decode engine.",
            "cause",
        )
        self._pause_s = histogram(
            "first_token_pause_seconds",
            "Seconds from a first token sent early to the second: what it took out "
            "of TTFT, and what the reader then waits.",
            _PAUSE_BUCKETS_S,
        )
        self._releases = counter(
            "kv_releases", "KV caches freed because nobody will read them."
        )
        self._without_kv = counter(
            "handovers_without_kv", "Decode legs that had to compute the prompt."
        )
        self._warm_ups = counter("warm_up_transfers", "KV caches moved by warm-up.")
        self._warm_up_s = gauge(
            "warm_up_seconds",
            "Seconds this server's warm-up took.",
            "max",
        )
        self._legs = gauge(
            "legs_in_flight",
            "Legs sent and not yet ended.",
            "livesum",
            "phase",
            "engine",
        )
        self._messages = counter(
            "messages",
            "Messages of engines, by what came of them (all but heard are ignored).",
            "engine",
            "outcome",
        )
        self._silence_s = gauge(
            "engine_silence_seconds",
            "Seconds since an engine was heard; +Inf: never.",
            "livemax",
            "engine",
        )
        self._suggested = gauge(
            "suggested_prefill_engines",
            "Prefill engines of the split that would leave both pools most room; NaN: "
            "not known.",
            "livemostrecent",
        )
        # 0 would say that every engine should do both.
        self._suggested.set(math.nan)
        self._step_ratio = gauge(
            "step_prediction_ratio",
            "Predicted / measured seconds of an engine's last steps, in the median; of "
            "those with prefill or without, whichever is further off.",
            "livemostrecent",
            "engine",
        )
        self._output_ratio = histogram(
            "output_tokens_ratio",
            "Predicted / actual output tokens of requests that ended by themselves.",
            _RATIO_BUCKETS,
            "source",
        )
        self._cached_tokens = counter(
            "cached_prompt_tokens",
            "Prompt tokens in prefix caches where the prompts went: expected by the "
            "router, and found by the engine.",
            "by",
        )
        self._ttft_ratio = histogram(
            "ttft_ratio", "Predicted / actual TTFT.", _RATIO_BUCKETS
        )
        self._e2e_ratio = histogram(
            "e2e_ratio", "Predicted / actual end-to-end time.", _RATIO_BUCKETS
        )
        self._decision_s = histogram(
            "decision_seconds",
            "Seconds to choose one engine.",
            _DECISION_BUCKETS_S,
        )

    def decided(self, choice: Choice, *, timed: bool) -> None:
        phase, engine = choice.phase.name.lower(), str(choice.rank)
        self._decisions.labels(phase, engine, choice.policy).inc()
        if timed:
            self._decision_s.observe(choice.seconds)

    def load(self, phase: Phase, rank: int, legs_now: int) -> None:
        self._legs.labels(phase.name.lower(), str(rank)).set(legs_now)

    def message(self, rank: int, outcome: str) -> None:
        self._messages.labels(str(rank), outcome).inc()

    def silence(self, rank: int, seconds: float) -> None:
        self._silence_s.labels(str(rank)).set(seconds)

    def split_suggested(self, prefill_engines: int) -> None:
        self._suggested.set(prefill_engines)

    def step_predicted(self, rank: int, ratio: float) -> None:
        self._step_ratio.labels(str(rank)).set(ratio)

    def output_predicted(self, source: str, predicted: int, actual: int) -> None:
        """How far off a predicted output length was; `actual` is at least 1."""
        self._output_ratio.labels(source).observe(predicted / actual)

    def prompt_cached(self, expected_tokens: int, found_tokens: int) -> None:
        """How much of a prompt was expected in a prefix cache, and how much was."""
        self._cached_tokens.labels("router").inc(expected_tokens)
        self._cached_tokens.labels("engine").inc(found_tokens)

    def ttft_predicted(self, predicted_s: float, actual_s: float) -> None:
        """How far off a predicted TTFT was; `actual_s` is above 0."""
        self._ttft_ratio.observe(predicted_s / actual_s)

    def e2e_predicted(self, predicted_s: float, actual_s: float) -> None:
        """How far off a predicted end-to-end time was; `actual_s` is above 0."""
        self._e2e_ratio.observe(predicted_s / actual_s)

    def one_leg(self, cause: str) -> None:
        self._one_leg.labels(cause).inc()

    def refused(self, slo: str | None) -> None:
        self._refused.labels(slo or "none").inc()

    def aborted(self, stage: str) -> None:
        self._aborts.labels(stage).inc()

    def first_token_sent(self) -> None:
        self._first_tokens.inc()

    def first_token_bypassed(self, cause: str) -> None:
        self._bypasses.labels(cause).inc()

    def paused(self, seconds: float) -> None:
        self._pause_s.observe(seconds)

    def kv_released(self) -> None:
        self._releases.inc()

    def handover_without_kv(self) -> None:
        self._without_kv.inc()

    def warmed_up(self, transfers: int, seconds: float) -> None:
        self._warm_ups.inc(transfers)
        self._warm_up_s.set(seconds)
