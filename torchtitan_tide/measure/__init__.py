"""Trainings that are measured, each in fresh processes; finished ones are kept. For `tide parity` and `tide reproduce`."""
