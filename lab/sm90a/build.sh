#!/bin/sh
# Builds lab/sm90a/bin/bench; fails on spills in a consumer or serialised wgmma. Needs nvcc 13 and python3.
set -e
cd "$(dirname "$0")"
python3 gen_wgmma.py
mkdir -p bin
nvcc -O3 -std=c++20 -gencode=arch=compute_90a,code=sm_90a -Xptxas -v -o bin/bench bench.cu 2> bin/build.log || { cat bin/build.log; exit 1; }
grep -E "spill stores|Compiling entry.*attention" bin/build.log | grep -A1 attention
! grep -E "C75[0-9][0-9]" bin/build.log
