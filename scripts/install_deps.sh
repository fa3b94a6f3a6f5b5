#!/bin/sh
# Installs the Debian packages that a part of the project needs and that are missing, and says which.
# usage: scripts/install_deps.sh build|bench|fuzz|python
set -eu

case "${1:-}" in
  # compiler and build tools; Highway, oneTBB, fmt (library); CLI11, nlohmann-json (tool); GoogleTest (tests)
  build) packages="g++ cmake ninja-build pkg-config libhwy-dev libtbb-dev libfmt-dev libcli11-dev nlohmann-json3-dev libgtest-dev" ;;
  bench) packages="libbenchmark-dev libopenblas-dev" ;;
  python) packages="python3 python3-venv" ;;
  fuzz) packages="clang libclang-rt-14-dev" ;;
  *) echo "usage: $0 build|bench|fuzz|python" >&2; exit 2 ;;
esac

if ! command -v dpkg-query >/dev/null; then
  echo "No dpkg here. Install with your own package manager what these Debian packages hold: $packages" >&2
  exit 0
fi

missing=""
for package in $packages; do
  if ! dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q 'ok installed'; then
    missing="$missing $package"
  fi
done
[ -z "$missing" ] && exit 0

as_root=""
if [ "$(id -u)" -ne 0 ]; then
  if ! command -v sudo >/dev/null; then
    echo "Missing packages, and no rights to install them. As root: apt-get install$missing" >&2
    exit 1
  fi
  as_root="sudo"
fi
echo "Installing through apt:$missing"
$as_root apt-get update -qq
# shellcheck disable=SC2086  # a list of words
$as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing >/dev/null
