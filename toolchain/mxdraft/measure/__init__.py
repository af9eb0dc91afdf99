"""Measurements of bundles, drafters and the dynamic origin."""
