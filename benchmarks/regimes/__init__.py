"""The router's setups side by side in a grid of regimes, simulated."""
