"""What an engine's work costs in seconds: profiles, and where they come from."""

from vllm_calrouter.calibration.profile import (
    EngineCosts,
    Profile,
    ProfileError,
    SloClass,
    load,
    save,
    shipped,
)

__all__ = [
    "EngineCosts",
    "Profile",
    "ProfileError",
    "SloClass",
    "load",
    "save",
    "shipped",
]
