#!/bin/sh
# Builds the kernels for 64-bit Arm and runs their tests in an emulator. Not part of the fast tests.
# Needs g++-aarch64-linux-gnu and qemu-user-static. Usage: tests/native/aarch64.sh [random calls]
set -eu
source=$(dirname "$0")
build=$source/../../build/native-aarch64
cmake -S "$source" -B "$build" -DSANITIZE=OFF \
  -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++
cmake --build "$build"
for program in test_kernels test_compress test_select; do
  qemu-aarch64-static -L /usr/aarch64-linux-gnu "$build/$program" "${1:-100}"
done
