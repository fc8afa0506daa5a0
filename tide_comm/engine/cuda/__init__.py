"""The CUDA engine: copy engines move, stream memory operations order, two short kernels add and cast. One machine."""
