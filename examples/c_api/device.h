// Memory of the device, and numbers of 8 and 16 bits, for the example.
#pragma once

#include <cuda_runtime.h>
#include <te_jax.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <vector>

inline void Ok(cudaError_t error) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "CUDA: %s\n", cudaGetErrorString(error));
  std::exit(1);
}
inline void Ok(te_jax_status status) {
  if (status == TE_JAX_OK) return;
  std::fprintf(stderr, "te_jax: status %d: %s\n", int(status), te_jax_error());
  std::exit(1);
}

inline uint16_t ToBf16(float f) {  // to nearest, ties to even; of finite numbers
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline double FromBf16(uint16_t half) {
  const uint32_t bits = uint32_t{half} << 16;
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}
inline double FromE4m3(uint8_t byte) {
  const int exponent = byte >> 3 & 15, mantissa = byte & 7;
  const double size = exponent ? std::ldexp(8 + mantissa, exponent - 10) : std::ldexp(mantissa, -9);
  return byte & 0x80 ? -size : size;
}

// An array of the device, and its numbers on the host.
class Array {
 public:
  Array(te_jax_type type, std::initializer_list<int64_t> shape) : type_(type) {
    array_.type = type, array_.rank = int(shape.size());
    for (int64_t size : shape) array_.shape[axis_++] = size, count_ *= size;
    Ok(cudaMalloc(&array_.data, count_ * width()));
  }
  Array(const Array&) = delete;
  ~Array() { cudaFree(array_.data); }

  Array& Put(const std::vector<float>& values) {
    std::vector<uint16_t> halves;
    for (float value : values) halves.push_back(ToBf16(value));
    Copy(type_ == TE_JAX_BF16 ? static_cast<const void*>(halves.data()) : values.data());
    return *this;
  }
  void Copy(const void* from) { Ok(cudaMemcpy(array_.data, from, count_ * width(), cudaMemcpyHostToDevice)); }
  std::vector<double> Get() const {
    std::vector<char> bytes(count_ * width());
    Ok(cudaMemcpy(bytes.data(), array_.data, bytes.size(), cudaMemcpyDeviceToHost));
    std::vector<double> values(count_);
    for (int64_t i = 0; i < count_; ++i) {
      const char* p = bytes.data() + i * width();
      values[i] = type_ == TE_JAX_BF16   ? FromBf16(*reinterpret_cast<const uint16_t*>(p))
                  : type_ == TE_JAX_E4M3 ? FromE4m3(*reinterpret_cast<const uint8_t*>(p))
                                         : *reinterpret_cast<const float*>(p);
    }
    return values;
  }
  // The same memory as an array of another shape.
  te_jax_array As(std::initializer_list<int64_t> shape) const {
    te_jax_array other = array_;
    other.rank = 0;
    for (int64_t size : shape) other.shape[other.rank++] = size;
    return other;
  }
  operator te_jax_array() const { return array_; }

 private:
  int64_t width() const {
    return type_ == TE_JAX_F32 || type_ == TE_JAX_I32 ? 4 : type_ == TE_JAX_BF16 ? 2 : 1;
  }

  te_jax_type type_;
  te_jax_array array_ = {};
  int axis_ = 0;
  int64_t count_ = 1;
};

// Makes a call with the workspace that it asks for, and waits.
template <typename Args>
void Run(te_jax_status (*ask)(const Args*, int64_t*), te_jax_status (*run)(const Args*, void*), Args args) {
  Ok(ask(&args, &args.workspace_bytes));
  if (args.workspace_bytes) Ok(cudaMalloc(&args.workspace, args.workspace_bytes));
  Ok(run(&args, nullptr));
  Ok(cudaDeviceSynchronize());
  Ok(cudaFree(args.workspace));
}
#define RUN(op, args) Run(te_jax_##op##_workspace, te_jax_##op, args)
