"""`tide reproduce`: the published step times, SM times, ablations and memory, measured anew, beside what was published."""
