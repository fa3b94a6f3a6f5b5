#!/bin/sh
# Runs a compiler command and fails where ptxas serialised wgmma, or spilled registers in an attention kernel
# (kernel_*.cu): either takes much of its speed without any other sign. What else ptxas -v tells is dropped.
# usage: check_ptxas.sh nvcc ...
report=$("$@" 2>&1) || { printf '%s\n' "$report" >&2; exit 1; }
printf '%s\n' "$report" | grep -vE '^ptxas info|^ +[0-9]+ bytes stack frame|^$' >&2
fault='\(C75[0-9]{2}\)'
case "$*" in */kernel_*) fault="$fault|[1-9][0-9]* bytes spill" ;; esac
faults=$(printf '%s\n' "$report" | grep -E "$fault")
[ -z "$faults" ] && exit 0
printf 'ptxas: wgmma serialised, or spills in:\n%s\n%s\n' \
  "$(printf '%s\n' "$report" | grep -B2 -E "$fault" | grep Compiling)" "$faults" >&2
exit 1
