# CMake's toolchain file of `make wheel PLATFORM=aarch64`: the compilers of Debian's g++-aarch64-linux-gnu, and nvcc, whose
# code for a GPU is the same for every host.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
set(CMAKE_CUDA_HOST_COMPILER aarch64-linux-gnu-g++)
