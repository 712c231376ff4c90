"""Property tests that try the same examples every time.

A fault that random examples find is worth finding, but not in somebody else's change:
`HYPOTHESIS_PROFILE=default pytest -m "not e2e"` looks for new ones.
"""

import os

from hypothesis import settings

settings.register_profile("repeatable", derandomize=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))
