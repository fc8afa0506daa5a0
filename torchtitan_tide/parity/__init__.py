"""`tide parity`: does a training with TIDE lose as one with stock communication does? The protocol, its curves, its verdict."""
