"""Real vLLM servers on CPU, each started once for the whole run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from examples.cpu_cluster import Cluster
from examples.tiny_model import make_tiny_lora, make_tiny_model
from tests.e2e.talk import Server


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.e2e)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def split(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two prefill and two decode engines behind three API servers."""
    folder = tmp_path_factory.mktemp("split")
    lora = make_tiny_lora(folder / "lora")
    journal = folder / "journal.jsonl"
    cluster = Cluster(
        model,
        engines=4,
        prefill=2,
        # Draws at random among idle engines, so every pair gets its share.
        policy="power_of_two",
        api_servers=3,
        arguments=[
            *("--router-config.journal", str(journal)),
            *("--router-config.decode_max_num_seqs", "16"),
            *("--scheduling-policy", "priority"),
            *("--enable-lora", "--max-lora-rank", "8"),
            *("--lora-modules", f"adapter={lora}"),
            *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
            "--enable-prompt-tokens-details",
            *("--max-logprobs", "-1"),
        ],
        log=folder / "server.log",
    )
    with cluster:
        server = Server(cluster, journal)
        server.warm_ups(3 * 2 * 2)
        yield server


@pytest.fixture(scope="session")
def unified(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two engines that do both, without a KV connector."""
    folder = tmp_path_factory.mktemp("unified")
    journal = folder / "journal.jsonl"
    cluster = Cluster(
        model,
        engines=2,
        policy="round_robin",
        arguments=[
            *("--router-config.journal", str(journal)),
            *("--api-key", "secret"),
            *("--enable-request-id-headers", "--enable-scale-out"),
            *("--router-config.slo_classes.tight.ttft_ms", "175"),
            *("--router-config.slo_classes.tight.tpot_ms", "40"),
            *("--router-config.slo_classes.loose.ttft_ms", "525"),
            *("--router-config.defaults.tiny.slo", "loose"),
            *("--router-config.predictor", "online"),
        ],
        log=folder / "server.log",
    )
    with cluster:
        yield Server(cluster, journal, key="secret")


@pytest.fixture(scope="session")
def pooling(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two engines that serve embeddings, at the plugin's defaults."""
    folder = tmp_path_factory.mktemp("pooling")
    cluster = Cluster(
        model,
        engines=2,
        arguments=["--runner", "pooling", "--convert", "embed"],
        log=folder / "server.log",
    )
    with cluster:
        yield Server(cluster, None)
