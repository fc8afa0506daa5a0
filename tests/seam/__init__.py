"""Tests of the FSDP2 seam: TIDE against stock FSDP2 on the same ranks, to the bit."""
