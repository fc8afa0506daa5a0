#!/usr/bin/env bash
# Builds tide_comm/engine/cuda/libtide_cuda.so with nvcc. ARCHS: compute capabilities, "90" unless set.
set -euo pipefail
cd "$(dirname "$0")/.."
codes=()
for arch in ${ARCHS:-90}; do codes+=(-gencode "arch=compute_$arch,code=sm_$arch"); done
exec nvcc -O3 -std=c++17 -fmad=false "${codes[@]}" -shared -Xcompiler -fPIC,-fvisibility=default,-Wall ${NVCC_FLAGS:-} \
  -o tide_comm/engine/cuda/libtide_cuda.so tide_comm/csrc/memory.cu tide_comm/csrc/ipc.cu tide_comm/csrc/multicast.cu tide_comm/csrc/kernels.cu tide_comm/csrc/executor.cu
