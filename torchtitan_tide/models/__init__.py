"""Models that TorchTitan does not bring."""
