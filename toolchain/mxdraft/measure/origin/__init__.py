"""The dynamic origin, measured."""
