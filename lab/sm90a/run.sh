#!/bin/sh
# On a machine with an H200, after build.sh: checks, times beside cuDNN BF16 (torch), sanitizers. About 60 s.
cd "$(dirname "$0")" || exit 1
B=./bin/bench
nvidia-smi --query-gpu=name,driver_version,clocks.sm,power.draw,power.limit --format=csv,noheader
for s in "1 1 1" "130 2 1" "640 1 1" "4609 3 2" "4608 24 15" "75600 8 7"; do $B $s || exit 1; done
python3 cudnn.py
for s in "32760 40 3" "75600 40 3"; do $B $s || exit 1; done
for t in memcheck racecheck synccheck; do compute-sanitizer --tool $t $B 1000 2 1 1 0 2>&1 | grep -E "SUMMARY|Error" | head -5; done
