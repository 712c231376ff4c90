"""Builds the C++ core and registers the plugin with vLLM."""

import re
from pathlib import Path

from pybind11.setup_helpers import Pybind11Extension
from setuptools import find_packages, setup

HERE = Path(__file__).parent

HEADERS = (
    "costs",
    "ledger",
    "table",
    "prefixes",
    "price",
    "policy",
    "queue",
    "policies",
    "replay",
)


def version() -> str:
    text = (HERE / "vllm_calrouter" / "__init__.py").read_text()
    match = re.search(r'^__version__ = "(.+)"$', text, re.MULTILINE)
    assert match, "vllm_calrouter/__init__.py must define __version__"
    return match.group(1)


setup(
    name="vllm-calrouter",
    version=version(),
    description="Routes vLLM requests to prefill and decode engines in one server",
    long_description=(HERE / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=find_packages(include=["vllm_calrouter", "vllm_calrouter.*"]),
    package_data={
        "vllm_calrouter": ["py.typed", "*.pyi"],
        "vllm_calrouter.calibration": ["profiles/*.json"],
        "vllm_calrouter.report": ["*.j2"],
    },
    ext_modules=[
        Pybind11Extension(
            "vllm_calrouter._core",
            ["csrc/binding.cpp"],
            include_dirs=["csrc"],
            depends=[f"csrc/{name}.h" for name in HEADERS],
            cxx_std=17,
            # No fused multiply-add: scores are the same numbers on every machine.
            extra_compile_args=["-O2", "-Wall", "-Wextra", "-ffp-contract=off"],
        )
    ],
    install_requires=[
        "click>=8.1",
        "rich>=13",
        "vllm>=0.32,<0.34",
        "nixl>=1.5",
        "torch",
        "msgspec>=0.19",
        "pyzmq>=26",
        "prometheus-client>=0.20",
        "tqdm>=4.66",
        "aiohttp>=3.9",
        "jinja2>=3.1",
        "numpy",
        "httpx>=0.27",
    ],
    extras_require={"plot": ["matplotlib>=3.8"]},
    entry_points={
        "vllm.general_plugins": ["calrouter = vllm_calrouter.plugin:register"],
        "console_scripts": ["calrouter = vllm_calrouter.cli:main"],
    },
    classifiers=[
        "Programming Language :: Python :: 3",
        "Programming Language :: C++",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
