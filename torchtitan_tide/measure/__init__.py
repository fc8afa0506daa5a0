"""Trainings that are measured: each in fresh processes, what it showed in a file, finished ones kept. For `tide parity` and `tide reproduce`."""
