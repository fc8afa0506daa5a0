"""Measures a cluster for the groups that a model has, and chooses values of `TideConfig` from what it measured."""
