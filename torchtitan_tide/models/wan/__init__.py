"""Wan2.2 A14B: the video diffusion transformer, its objective, trainer, data and checkpoints."""
