"""What an engine's work costs in seconds: profiles, and where they come from."""

from vllm_calrouter.calibration.profile import (
    STAND_IN,
    EngineCosts,
    Profile,
    ProfileError,
    SloClass,
    load,
    save,
    shipped,
)

__all__ = [
    "STAND_IN",
    "EngineCosts",
    "Profile",
    "ProfileError",
    "SloClass",
    "load",
    "save",
    "shipped",
]
