"""What runs in the engine processes: roles, limits, and what an engine tells."""
