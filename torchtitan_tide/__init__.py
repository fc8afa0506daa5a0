"""TIDE in TorchTitan: the `[tide]` section, the training entry, the parallelize wrapper and real text to train on."""
