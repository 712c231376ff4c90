from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_calrouter.launch import check_config, resolve
from vllm_calrouter.options import OptionError, RouterOptions


def launch(**changes: Any) -> Namespace:
    settings: dict[str, Any] = {
        "router_plugin": "calrouter",
        "router_policy": None,
        "router_config": None,
        "data_parallel_size": 4,
        **changes,
    }
    return Namespace(**settings)


def test_without_the_plugin_nothing_is_resolved() -> None:
    assert resolve(launch(router_plugin=None), {}) is None


def test_policy_s_short_form_is_the_long_one() -> None:
    short = resolve(launch(router_policy="round_robin"), {})
    long = resolve(launch(router_config={"policy": "round_robin"}), {})
    assert short == long == RouterOptions(policy="round_robin")


PRICED = {"policy": "calibrated", "profile": "a40-qwen2.5-3b"}

WRONG_LAUNCHES = [
    ({"router_plugin": "kalrouter"}, "--router-plugin calrouter"),
    ({"router_plugin": None, "router_policy": "vllm"}, "--router-plugin calrouter"),
    ({"router_plugin": None, "router_config": {"prefill": 1}}, "no effect"),
    ({"router_policy": "vllm", "router_config": {"policy": "x"}}, "contradict"),
    ({"router_config": {"prefill": 4}}, "--router-config.prefill 3"),
    ({"router_config": {"prefill": 9}}, "--data-parallel-size 10"),
    ({"data_parallel_size": 1}, "--data-parallel-size"),
    ({"router_config": {"seed": 3}}, "--router-policy power_of_two"),
    ({"router_config": {"long_share": 0.2}}, "--router-policy length_threshold"),
    ({"router_config": {"decode_max_num_seqs": 8}}, "--router-config.prefill N"),
    (
        {"router_policy": "vllm", "router_config": {"calibration": False}},
        "--router-policy calibrated",
    ),
    (
        {
            "router_config": {
                "policy": "calibrated",
                "calibration": "on",
                "telemetry": "off",
            }
        },
        "drop it or --router-config.telemetry off",
    ),
    *(
        (
            {"router_policy": "round_robin", "router_config": {f"{of}_weight": 2}},
            f"--router-config.{of}_weight has no effect",
        )
        for of in ("slot", "kv", "slo")
    ),
    (
        {"router_policy": "paper", "router_config": {"slot_weight": 2}},
        "--router-policy calibrated",
    ),
    ({"router_config": {"online_keys": 20}}, "--router-config.predictor online"),
    (
        {"router_config": {"patience": 1, "order": "fcfs"}},
        "--router-config.order deadline",
    ),
    (
        {
            "router_policy": "vllm",
            "router_config": {"profile": "a40-qwen2.5-3b", "order": "fcfs"},
        },
        "order short_first or deadline",
    ),
    (
        {"router_config": {**PRICED, "default_slo": "quick"}},
        "not in slo_classes ('tight', 'loose')",
    ),
    ({"router_config": {"decode_order": "deadline"}}, "--router-config.prefill N"),
    ({"router_config": {"noise": 0.2}}, "--router-config.predictor noisy"),
    (
        {"router_config": {"defaults": {"b": {}}}, "served_model_name": ["a"]},
        "'b', which is not served: write one of 'a'",
    ),
    ({"grpc": True}, "drop --grpc"),
    ({"data_parallel_external_lb": True}, "drop --data-parallel-external-lb"),
    ({"data_parallel_hybrid_lb": True}, "drop --data-parallel-hybrid-lb"),
    ({"data_parallel_multi_port_external_lb": True}, "drop --data-parallel-multi"),
    ({"data_parallel_rank": 0}, "drop --data-parallel-rank"),
    ({"enable_elastic_ep": True}, "drop --enable-elastic-ep"),
    ({"nnodes": 2}, "--nnodes has not been tried"),
    ({"router_config": {"warm_up": False}}, "--router-config.prefill N"),
    ({"router_config": {"nixl_sleep_ms": 1}}, "--router-config.prefill N"),
    ({"router_policy": "deadline"}, "write --router-policy calibrated"),
    (
        {"router_policy": "deadline", "router_config": {"prefill": 1, "order": "fcfs"}},
        "drop --router-config.order",
    ),
    ({"router_config": {"journal": ""}}, "cannot be written"),
    ({"router_config": {"journal": "/proc/none/j"}}, "cannot be written"),
    ({"data_parallel_backend": "ray"}, "--data-parallel-backend mp"),
    ({"router_config": {"telemetry": "on"}}, "write ipc, ipc:///FOLDER, tcp://"),
    ({"router_config": {"telemetry": "tcp://127.0.0.1:65534"}}, "65532 or less"),
    ({"router_config": {"telemetry": "tcp://192.0.2.1:5600"}}, "of this machine"),
    ({"router_config": {"telemetry_keys": "/proc/none"}}, "calrouter.keys /proc/none"),
    ({"router_config": {"telemetry": "off", "telemetry_keys": "x"}}, "drop it"),
]


@pytest.mark.parametrize(("changes", "says"), WRONG_LAUNCHES)
def test_a_launch_that_cannot_work_says_what_to_write(
    changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(OptionError) as error:
        resolve(launch(**changes), {})
    assert says in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("value", ["1", "2", "true"])
def test_the_rust_front_end_is_refused(value: str) -> None:
    with pytest.raises(OptionError, match="unset VLLM_USE_RUST_FRONTEND"):
        resolve(launch(), {"VLLM_USE_RUST_FRONTEND": value})


def test_a_profile_s_class_may_be_the_default() -> None:
    options = resolve(launch(router_config={**PRICED, "default_slo": "tight"}), {})
    assert options is not None
    assert options.default_slo == "tight"


@pytest.mark.parametrize("order", ["short_first", "deadline"])
def test_every_order_but_vllm_s_reads_the_profile(order: str) -> None:
    chosen = {"policy": "vllm", "order": order, "profile": "a40-qwen2.5-3b"}
    options = resolve(launch(router_config=chosen), {})
    assert options is not None
    assert options.order == order


def test_admission_reads_the_profile_and_may_be_calibrated() -> None:
    chosen = {**PRICED, "policy": "vllm", "order": "fcfs", "admission": 2}
    options = resolve(launch(router_config={**chosen, "calibration": "on"}), {})
    assert options is not None
    assert options.prices
    assert options.calibrates


def test_a_journal_in_a_folder_still_to_be_made_is_fine(tmp_path: Path) -> None:
    journal = str(tmp_path / "new" / "journal.jsonl")
    assert resolve(launch(router_config={"journal": journal}), {}) is not None


class Transfer(SimpleNamespace):
    def get_from_extra_config(self, key: str, default: Any) -> Any:
        return self.extra.get(key, default)


def config(**changes: Any) -> Any:
    transfer = Transfer(
        kv_connector=changes.pop("connector", "NixlConnector"),
        kv_connector_module_path=changes.pop("module", None),
        extra=changes.pop("extra", {}),
    )
    settings = {
        "is_moe": False,
        "runner_type": "generate",
        "max_num_seqs": 64,
        "max_num_batched_tokens": 2048,
        "enable_chunked_prefill": True,
        "data_parallel_size": 4,
        "data_parallel_size_local": 4,
        "data_parallel_rank": 0,
        "data_parallel_master_ip": "127.0.0.1",
        **changes,
    }
    everything = SimpleNamespace(model="m", max_model_len=4096, **settings)
    return SimpleNamespace(
        model_config=everything,
        scheduler_config=everything,
        parallel_config=everything,
        kv_transfer_config=transfer if transfer.kv_connector else None,
    )


def test_a_sound_configuration_passes() -> None:
    check_config(config(), RouterOptions(prefill=2, decode_max_num_seqs=16))


def test_a_unified_pool_needs_no_connector() -> None:
    check_config(config(connector=None, is_moe=True), RouterOptions())


WRONG_CONFIGS = [
    ({"is_moe": True}, {}, "mixture of experts"),
    ({"runner_type": "pooling"}, {}, "never decodes"),
    ({"connector": None}, {}, '"kv_connector":"NixlConnector"'),
    ({"connector": "LMCacheConnectorV1"}, {}, "the connector is LMCacheConnectorV1"),
    ({"extra": {"bidirectional_kv_xfer": True}}, {}, "bidirectional_kv_xfer"),
    ({"module": "mine"}, {}, "drop kv_connector_module_path"),
    ({}, {"decode_max_num_seqs": 65}, "--max-num-seqs 65"),
    ({}, {"prefill_max_num_batched_tokens": 4096}, "--max-num-batched-tokens 4096"),
    (
        {"enable_chunked_prefill": False, "max_num_batched_tokens": 8192},
        {"prefill_max_num_batched_tokens": 1024},
        "prefill_max_num_batched_tokens 4096 or more",
    ),
    (
        {"enable_chunked_prefill": False, "max_num_batched_tokens": 8192},
        {"decode_max_num_batched_tokens": 1024},
        "decode_max_num_batched_tokens 4096 or more",
    ),
]


@pytest.mark.parametrize(("changes", "options", "says"), WRONG_CONFIGS)
def test_a_configuration_that_cannot_work_says_what_to_write(
    changes: dict[str, Any], options: dict[str, Any], says: str
) -> None:
    with pytest.raises(OptionError) as error:
        check_config(config(**changes), RouterOptions(prefill=2, **options))
    assert says in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "served",
    [
        {"served_model_name": ["a", "b"]},
        {"model_tag": "b"},
        {"model": "b"},
        {"served_model_name": ["a"], "enable_lora": True},
    ],
)
def test_defaults_may_be_for_any_name_a_request_can_give(
    served: dict[str, Any],
) -> None:
    config = {"defaults": {"b": {"output_tokens": 9}}}
    options = resolve(launch(router_config=config, **served), {})
    assert options is not None
    assert options.defaults["b"].output_tokens == 9
