"""Engines carry programs out: `host` on any CPU with shared memory. What one is, is said in `base`."""
