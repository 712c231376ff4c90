"""The seam on the installed vLLM: nothing missing, and nothing changed when off."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from examples.tiny_model import make_tiny_model
from vllm_calrouter import plugin, seam, transport


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("model") / "tiny"))


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


NIXL = '{"kv_connector":"NixlConnector","kv_role":"kv_both"}'
SPLIT = [
    *("--data-parallel-size", "4", "--router-plugin", "calrouter"),
    *("--router-config.prefill", "2", "--kv-transfer-config", NIXL),
]


def engine_config(model: str, *arguments: str) -> Any:
    plugin.register()
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    args = parser.parse_args(["--model", model, "--enforce-eager", *arguments])
    return AsyncEngineArgs.from_cli_args(args).create_engine_config()


def test_the_installed_vllm_has_all_that_is_needed() -> None:
    assert seam.missing_needs() == []


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    needs = (("vllm.v1.engine", "EngineCoreRequest", ("no_such",)), ("no.such", "", ()))
    monkeypatch.setattr(seam, "NEEDS", needs)
    assert seam.missing_needs() == [
        "vllm.v1.engine.EngineCoreRequest.no_such",
        "no.such",
    ]


def test_a_vllm_without_it_ends_the_start_in_one_line(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seam, "NEEDS", (("vllm.v1.engine", "", ("no_such",)),))
    with pytest.raises(SystemExit, match=r"lacks vllm\.v1\.engine\.no_such.*install"):
        engine_config(model, *SPLIT)


def test_registering_twice_wraps_once() -> None:
    plugin.register()
    wrapped = EngineArgs.create_engine_config
    plugin.register()
    assert EngineArgs.create_engine_config is wrapped


def test_help_has_a_group_of_its_own() -> None:
    plugin.register()
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    (group,) = (g for g in parser._action_groups if g.title == "RouterConfig")
    options = {name for a in group._group_actions for name in a.option_strings}
    assert options == {"--router-plugin", "--router-policy", "--router-config"}


def test_without_the_plugin_classes_are_vllm_s_own(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.engine import core_client

    config = engine_config(model, "--data-parallel-size", "4")
    assert config.scheduler_config.scheduler_cls is None
    assert not config.additional_config
    assert config.kv_transfer_config is None
    seam._install_client()
    client = client_made_for(config, core_client, monkeypatch)
    assert client == "vLLM's own"


def test_with_the_plugin_classes_are_the_router_s(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.v1.engine import core_client

    from vllm_calrouter.engine.connector import NixlConnector
    from vllm_calrouter.engine.scheduler import build_scheduler
    from vllm_calrouter.router import client

    config = engine_config(model, *SPLIT)
    assert config.scheduler_config.get_scheduler_cls() is build_scheduler
    connector = KVConnectorFactory.get_connector_class(config.kv_transfer_config)
    assert connector is NixlConnector
    monkeypatch.setattr(client, "RouterClient", lambda *_, **__: "the router's")
    assert client_made_for(config, core_client, monkeypatch) == "the router's"


def client_made_for(config: Any, core_client: Any, patch: pytest.MonkeyPatch) -> Any:
    for name in ("DPLBAsyncMPClient", "DPAsyncMPClient", "AsyncMPClient"):
        patch.setattr(core_client, name, lambda *_, **__: "vLLM's own")
    make = core_client.EngineCoreClient.make_async_mp_client
    return make(vllm_config=config, executor_class=object, log_stats=False)


def test_a_scheduler_of_the_user_s_is_extended_not_replaced(model: str) -> None:
    own = "vllm.v1.core.sched.scheduler.Scheduler"
    config = engine_config(model, *SPLIT, "--scheduler-cls", own)
    assert config.additional_config["calrouter_scheduler"] == own


FOREIGN = "tests.test_seam.Foreign"


class Foreign:
    """A scheduler that has nothing of vLLM's."""


def test_a_scheduler_that_cannot_be_observed_ends_in_one_line(model: str) -> None:
    with pytest.raises(SystemExit, match=r"Foreign .*write .*telemetry off") as end:
        engine_config(model, *SPLIT, "--scheduler-cls", FOREIGN)
    assert "\n" not in str(end.value)
    off = ["--router-config.telemetry", "off"]
    with pytest.raises(SystemExit, match=r"Foreign .*write .*order fcfs"):
        engine_config(model, *SPLIT, "--scheduler-cls", FOREIGN, *off)
    plain = [*off, "--router-config.order", "fcfs"]
    config = engine_config(model, *SPLIT, "--scheduler-cls", FOREIGN, *plain)
    assert config.additional_config["calrouter_scheduler"] == FOREIGN


def test_a_launch_changes_no_key_of_the_compile_cache(model: str) -> None:
    first = engine_config(model, *SPLIT)
    folder = transport.located("ipc")
    second = engine_config(model, *SPLIT)
    assert transport.located("ipc") != folder
    assert first.additional_config == second.additional_config


def test_a_launch_without_a_command_line_has_a_folder_too(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin.register()
    monkeypatch.setattr(transport, "_made_by", set())
    monkeypatch.delenv("CALROUTER_SOCKETS", raising=False)
    AsyncEngineArgs(
        model=model,
        enforce_eager=True,
        data_parallel_size=2,
        additional_config={"calrouter": {"policy": "round_robin"}},
    ).create_engine_config()
    transport.check_private(transport.located("ipc"))


def test_additional_config_of_the_user_s_stays(model: str) -> None:
    extra = ["--additional-config", '{"mine": 1}']
    config = engine_config(model, *SPLIT, *extra)
    assert config.additional_config["mine"] == 1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--router-plugin", "x"], "write --router-plugin calrouter"),
        (["--router-config", "{"], "is not JSON"),
        ([*SPLIT, "--router-config.prefil", "1"], "did you mean 'prefill'"),
        (["--router-policy", "vllm"], "add --router-plugin calrouter"),
    ],
)
def test_a_wrong_command_line_ends_before_anything_is_built(
    model: str, arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        engine_config(model, *arguments)
    assert end.value.code == 2
    assert says in capsys.readouterr().err.splitlines()[-1]


def test_a_wrong_configuration_ends_in_one_line(model: str) -> None:
    arguments = SPLIT[:-2]
    with pytest.raises(SystemExit, match="add --kv-transfer-config") as end:
        engine_config(model, *arguments)
    assert "\n" not in str(end.value)


def test_nothing_heavy_is_imported_before_the_plugin_is_chosen(tmp_path: Path) -> None:
    import subprocess
    import sys

    code = (
        "import sys; from vllm_calrouter import plugin; import vllm.engine.arg_utils;"
        "before = set(sys.modules); plugin.register();"
        "print(sorted(m for m in set(sys.modules) - before if 'calrouter' not in m))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert len(done.stdout.splitlines()[-1].split(",")) < 20, done.stdout
