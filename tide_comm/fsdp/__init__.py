"""The FSDP2 seam: what TIDE replaces inside FSDP2, and how parameters and gradients meet the arena."""
