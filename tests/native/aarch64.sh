#!/bin/sh
# Builds the kernels for 64-bit Arm and runs their tests in an emulator, as each of several processors: which
# instruction sets a processor gets is part of the test. Not part of the fast tests.
# Needs g++-aarch64-linux-gnu and qemu-user-static. Usage: tests/native/aarch64.sh [random calls]
set -eu
source=$(dirname "$0")
build=$source/../../build/native-aarch64
cmake -S "$source" -B "$build" -DSANITIZE=OFF \
  -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++
cmake --build "$build"

run_as() {  # processor, instruction sets, random calls
  for program in test_kernels test_compress test_select; do
    said=$(qemu-aarch64-static -cpu "$1" -L /usr/aarch64-linux-gnu "$build/$program" "$3")
    echo "$1: $program $said"
    [ "$said" = "passed: $2" ]
  done
}

run_as cortex-a72 "portable" 5
run_as neoverse-n1 "portable" 5
run_as max,sve=off "portable neon_bf16" 5
run_as max,sve-max-vq=1 "portable neon_bf16" 5
run_as max,sve-max-vq=4,sve-default-vector-length=64 "portable neon_bf16" 5
run_as max,sve-max-vq=2 "portable neon_bf16 sve256_bf16" "${1:-100}"
