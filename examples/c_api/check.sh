#!/usr/bin/env bash
# Builds the C++ program with CMake from the te_jax that $PYTHON has installed, and runs it and the PyTorch program on a GPU.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=${PYTHON:-python3}
build=$(mktemp -d)
trap 'rm -rf "$build"' EXIT
cd "$build"  # where no source tree is in the way of what is installed
cmake -S "$here" -B . -Dte_jax_DIR="$("$python" -c 'import te_jax; print(te_jax.get_cmake_dir())')"
cmake --build .
# cuBLASLt of NVIDIA's wheels, if they are there.
cublas=$("$python" -c 'from te_jax.core import extension; print(dict(extension.library_paths()).get("libcublasLt.so.13", ""))')
./te_jax_example ${cublas:+"$cublas"}
"$python" "$here/with_torch.py"
