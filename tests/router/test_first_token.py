"""The first token straight from the prefill engine, without engines."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import RepetitionDetectionParams, StructuredOutputsParams
from vllm.v1.engine import EngineCoreEvent, EngineCoreEventType, FinishReason

from examples.tiny_model import make_tiny_model
from tests.router.requests import KV, answer, prefilled, request, token
from vllm_calrouter.options import RouterOptions
from vllm_calrouter.router.first_token import FirstToken, first_token_rules
from vllm_calrouter.router.metrics import RouterMetrics
from vllm_calrouter.router.router import Router
from vllm_calrouter.router.wishes import Rules


class Lines(list[dict[str, Any]]):
    write = list.append


class Rig:
    """A router of 2 + 4 engines whose clock, journal and metrics a test holds."""

    def __init__(self, rules: FirstToken | None = None, **options: Any) -> None:
        self.now_s = 0.0
        self.journal = Lines()
        self.registry = CollectorRegistry()
        self.router = Router(
            RouterOptions(policy="round_robin", prefill=2, **options),
            6,
            first_token=rules,
            metrics=RouterMetrics(self.registry),
            journal=self.journal,  # type: ignore[arg-type]
            clock=lambda: self.now_s,
        )

    def count(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"vllm:calrouter_{name}", labels)

    @property
    def idle(self) -> bool:
        return self.router.placer.table.is_idle() and not self.router.requests_under_way


def test_the_token_goes_to_the_client_and_the_decode_leg_goes_on_from_it() -> None:
    rig = Rig()
    asked = request(params={"max_tokens": 20, "min_tokens": 5, "logprobs": 2})
    first = rig.router.begin(asked)
    params = first.sampling_params
    assert (params.max_tokens, params.min_tokens, params.logprobs) == (1, 1, 2)
    assert params.extra_args["kv_transfer_params"]["do_remote_decode"]

    outputs = answer(prefilled("r"))
    (second,) = rig.router.answered(outputs)
    (told,) = outputs.outputs
    assert (told.request_id, told.new_token_ids) == ("r", [7])
    assert not told.finished
    assert told.kv_transfer_params is None
    assert second.request_id == "r"
    assert second.prompt_token_ids == [*range(10), 7]
    params = second.sampling_params
    assert (params.max_tokens, params.min_tokens) == (19, 4)
    assert params.extra_args["kv_transfer_params"] == KV
    # What the API server reads is as it was.
    assert asked.prompt_token_ids == list(range(10))
    assert asked.sampling_params.max_tokens == 20

    rig.router.answered(answer(token("r", FinishReason.LENGTH)))
    assert rig.idle
    assert rig.journal[0]["output_tokens"] == 2
    assert rig.count("first_tokens_total") == 1


def test_ttft_ends_with_prefill_and_the_pause_is_told() -> None:
    rig = Rig()
    rig.router.begin(request())
    rig.now_s = 1.0
    rig.router.answered(answer(prefilled("r")))
    rig.now_s = 1.25
    rig.router.answered(answer(token("r")))
    rig.now_s = 3.0
    rig.router.answered(answer(token("r", FinishReason.STOP)))
    (line,) = rig.journal
    assert (line["prefill_s"], line["ttft_s"], line["pause_s"]) == (1.0, 1.0, 0.25)
    assert rig.count("first_token_pause_seconds_sum") == 0.25
    assert rig.count("first_token_pause_seconds_count") == 1


@pytest.mark.parametrize("finish", [FinishReason.STOP, FinishReason.LENGTH])
def test_a_first_token_that_is_the_last_needs_no_decode_leg(
    finish: FinishReason,
) -> None:
    rig = Rig(FirstToken(max_model_len=11))
    rig.router.begin(request())
    output = prefilled("r")
    output.finish_reason, output.stop_reason = finish, 7
    outputs = answer(output)
    (release,) = rig.router.answered(outputs)
    assert release.abort_immediately
    (told,) = outputs.outputs
    assert (told.request_id, told.finish_reason, told.stop_reason) == ("r", finish, 7)
    assert rig.idle
    assert rig.journal[0]["finish"] == str(finish)
    assert rig.journal[0]["decode_rank"] is None


def test_one_token_below_the_model_s_limit_goes_on() -> None:
    rig = Rig(FirstToken(max_model_len=12))
    rig.router.begin(request())
    (leg,) = rig.router.answered(answer(prefilled("r")))
    assert not leg.abort_immediately


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


def test_a_stop_string_in_the_first_token_ends_the_request(model: Path) -> None:
    from vllm.tokenizers import get_tokenizer

    tokenizer = get_tokenizer(str(model))
    (number,) = tokenizer.encode("prefill", add_special_tokens=False)[:1]
    text = tokenizer.decode([number])
    for stop, ends in (
        *(([text], True), (["zzz", text[1:3]], True)),
        *(([text + "!"], False), ([], False)),
    ):
        rig = Rig(FirstToken(tokenizer=tokenizer))
        rig.router.begin(request(params={"stop": stop}))
        output = prefilled("r")
        output.new_token_ids = [number]
        (leg,) = rig.router.answered(answer(output))
        assert leg.abort_immediately == ends, stop
        assert rig.idle == ends
        assert [line["finish"] for line in rig.journal] == ["stop"] * ends


BYPASSED: dict[str, dict[str, Any]] = {
    "structured_output": {
        "structured_outputs": StructuredOutputsParams(choice=["a", "b"])
    },
    "penalties": {"frequency_penalty": 0.1},
    "seed": {"seed": 3, "temperature": 0.5},
    "bad_words": {"_bad_words_token_ids": [[1], [2, 3]]},
    "thinking_budget": {"thinking_token_budget": 10},
    "repetition_detection": {
        "repetition_detection": RepetitionDetectionParams(3, 1, 2)
    },
    "client": {"extra_args": {"first_token": "off"}},
}


@pytest.mark.parametrize("cause", BYPASSED)
def test_what_looks_back_takes_the_ordinary_way_and_is_counted(cause: str) -> None:
    rig = Rig()
    rig.router.begin(request(params=BYPASSED[cause]))
    outputs = answer(prefilled("r"))
    (leg,) = rig.router.answered(outputs)
    assert outputs.outputs == []
    assert leg.prompt_token_ids == list(range(10))
    assert leg.sampling_params.max_tokens == 20
    assert rig.count("first_token_bypasses_total", cause=cause) == 1
    rig.router.answered(answer(token("r", FinishReason.STOP)))
    assert rig.journal[0]["first_token_bypass"] == cause
    assert rig.journal[0]["pause_s"] is None


@pytest.mark.parametrize(
    "params",
    [
        {"seed": 3, "temperature": 0.0},
        {"repetition_penalty": 1.2},
        {"logit_bias": {1: 2.0}},
        {"allowed_token_ids": [1, 2]},
        {"_bad_words_token_ids": [[1], [2]]},
        {"stop": ["x"]},
        {"stop_token_ids": [1]},
    ],
)
def test_what_depends_on_the_text_alone_is_exact(params: dict[str, Any]) -> None:
    assert FirstToken().why_not(request(params=params)) is None


@pytest.mark.parametrize("rules", [None, FirstToken(enabled=False)])
def test_off_is_off_and_no_bypass(rules: FirstToken | None) -> None:
    rig = Rig(rules, first_token=False)
    rig.router.begin(request())
    outputs = answer(prefilled("r"))
    rig.router.answered(outputs)
    assert outputs.outputs == []
    assert rig.count("first_token_bypasses_total", cause="off") is None


def test_a_prompt_computed_in_part_is_sampled_again() -> None:
    rig = Rig()
    rig.router.begin(request())
    outputs = answer(prefilled("r", {**KV, "remote_num_tokens": 9}))
    (leg,) = rig.router.answered(outputs)
    assert outputs.outputs == []
    assert leg.prompt_token_ids == list(range(10))
    assert rig.count("first_token_bypasses_total", cause="partial_prefill") == 1


def test_a_client_that_leaves_between_the_tokens_frees_all() -> None:
    rig = Rig()
    rig.router.begin(request())
    rig.router.answered(answer(prefilled("r")))
    assert rig.router.abort(["r"]) == ["r"]
    rig.router.answered(answer(dropped=("r",)))
    assert rig.idle


def test_a_decode_leg_that_cannot_be_sent_ends_what_the_client_has_begun() -> None:
    rig = Rig()
    rig.router.begin(request())
    (leg,) = rig.router.answered(answer(prefilled("r")))
    told = rig.router.not_sent(leg)
    assert told is not None
    assert (told.new_token_ids, told.finish_reason) == ([], FinishReason.ERROR)
    assert rig.idle


def test_the_second_queue_is_not_taken_for_the_first() -> None:
    rig = Rig()
    rig.router.begin(request())
    rig.router.answered(answer(prefilled("r")))
    later = token("r")
    later.events = [
        EngineCoreEvent.new_event(kind, 1.0) for kind in EngineCoreEventType
    ]
    outputs = answer(later)
    rig.router.answered(outputs)
    # vLLM needs the others to follow an adapter's requests through a preemption.
    assert [event.type for event in outputs.outputs[0].events] == [
        EngineCoreEventType.SCHEDULED,
        EngineCoreEventType.PREEMPTED,
    ]


def test_a_decode_leg_without_a_token_is_no_pause() -> None:
    rig = Rig()
    rig.router.begin(request())
    rig.router.answered(answer(prefilled("r")))
    rig.now_s = 9.0
    failed = token("r", FinishReason.ERROR)
    failed.new_token_ids = []
    rig.router.answered(answer(failed))
    assert rig.count("first_token_pause_seconds_count") == 0
    assert rig.journal[0]["pause_s"] is None


async def test_a_warm_up_tells_nobody() -> None:
    rig = Rig()
    done: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    rig.router.begin(request(), pair=(0, 3), done=done)
    outputs = answer(prefilled("r"))
    (leg,) = rig.router.answered(outputs)
    assert outputs.outputs == []
    assert leg.data_parallel_rank == 3
    rig.router.answered(answer(token("r", FinishReason.LENGTH)))
    assert done.result() == "length"
    assert rig.count("first_tokens_total") == 0


async def test_a_warm_up_is_no_bypass() -> None:
    rig = Rig(FirstToken(never="speculative_decoding"))
    done: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    rig.router.begin(request(), pair=(0, 3), done=done)
    rig.router.answered(answer(prefilled("r")))
    labels = {"cause": "speculative_decoding"}
    assert rig.count("first_token_bypasses_total", **labels) is None


@pytest.mark.parametrize("value", ["OFF", "banana", ["off"], 2, {}])
def test_a_switch_that_cannot_be_meant_is_refused(value: Any) -> None:
    rules = Rules(RouterOptions(prefill=2))
    with pytest.raises(VLLMValidationError, match="first_token"):
        rules.read({"first_token": value}, None)


@pytest.mark.parametrize(
    ("value", "on"), [("on", True), ("off", False), (True, True), (False, False)]
)
def test_a_switch_is_read(value: Any, on: bool) -> None:
    rules = Rules(RouterOptions(prefill=2))
    assert rules.read({"first_token": value}, None).first_token is on


def config(**changes: Any) -> Any:
    model = {
        "max_model_len": 100,
        "logits_processors": None,
        "skip_tokenizer_init": True,
        "is_diffusion": False,
    }
    model |= {key: changes.pop(key) for key in set(model) & set(changes)}
    settings = {"speculative_config": None, "watermark_config": None, **changes}
    return SimpleNamespace(model_config=SimpleNamespace(**model), **settings)


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({}, None),
        ({"speculative_config": object()}, "speculative_decoding"),
        ({"logits_processors": ["mine"]}, "logits_processors"),
        ({"watermark_config": object()}, "watermark"),
        ({"is_diffusion": True}, "diffusion"),
    ],
)
def test_a_server_s_own_configuration_may_forbid_it(
    changes: dict[str, Any], cause: str | None
) -> None:
    rules = first_token_rules(config(**changes), RouterOptions(prefill=2))
    assert rules.why_not(request()) == cause


def test_text_that_its_client_wants_unmarked_is_exact_under_a_watermark() -> None:
    rules = FirstToken(watermark=True)
    assert rules.why_not(request(params={"watermarking": False})) is None
