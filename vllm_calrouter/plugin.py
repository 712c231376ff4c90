"""The entry point vLLM loads in every process (`vllm.general_plugins`)."""


def register() -> None:
    """Add the router's options to vLLM. May be called any number of times.

    Nothing else of vLLM changes, and nothing heavy is imported, until a launch
    chooses the plugin with `--router-plugin calrouter`.
    """
    from vllm_calrouter import seam

    seam.extend_engine_args()
