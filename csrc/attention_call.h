// A call of an attention op: its operands and results, checked, and its run. attention_call.cc; the handlers
// are in attention.cc.
#pragma once

#include <initializer_list>

#include "attention_plan.h"
#include "expect.h"

namespace te {

// The masks and the dropout of a call.
struct Attributes {
  int64_t left, right;
  bool bottom_right, seq_major;
  double scale, dropout_rate;
  bool deterministic = false;  // backward
};

// Of the four shapes of a bias at most one is present: [b, h, s, t], [b, s, t], [h, s, t], [s, t]. So of its
// gradient.
struct Bias {
  const Arg &bh, &b, &h, &none;
  const Arg& given() const { return Present(bh) ? bh : Present(b) ? b : Present(h) ? h : none; }
};

// Operands that all ops have beside those that attend.
struct Extras {
  Bias bias;
  const Arg &segments, &rng;
};

// A call, its operands checked: what its plan depends on, and where its arrays are.
struct Call {
  const char* op;
  AttentionKey key = {};
  ffi::DataType dtype = ffi::BF16;
  GraphPointers pointers = {};
  const int32_t* segments = nullptr;
};

// q [b, s, h, d], k [b, t, g, d], v [b, t, g, e].
ffi::Error SetOperands(Call* call, const Arg& q, const Arg& k, const Arg& v);
// kv [b, t, 2, g, d]. interleaved: it lies as [b, t, g, 2, d].
ffi::Error SetJoined(Call* call, const Arg& q, const Arg& kv, bool interleaved);
// qkv [b, s, 3, h, d]. interleaved: it lies as [b, s, h, 3, d].
ffi::Error SetJoined(Call* call, const Arg& qkv, bool interleaved);

// Results of a forward op.
struct Outputs {
  const Arg &out, &lse, &drawn, &workspace;
};

// What a backward op has beside.
struct Backprop {
  const Arg &dout, &out, &lse;
  Bias dbias;
  const Arg& workspace;
};

// The rest of a forward op, and of a backward op: masks, extras, results.
ffi::Error SetForward(Call* call, const Attributes& attributes, const Extras& extras, const Outputs& outputs);
ffi::Error SetBackward(Call* call, const Attributes& attributes, const Extras& extras,
                       const Backprop& backprop);

// The gradient `name` of an operand: of `tensor`, and, where it lies in the same array, of those after it.
ffi::Error SetGradient(Call* call, const char* name, AttentionTensor tensor, const Arg& gradient,
                       const Arg& operand);

// The stages: the first builds the plan, the second runs it. results: all but the workspace.
ffi::Error Build(cudaStream_t stream, const Call& call);
ffi::Error Run(cudaStream_t stream, Call& call, std::initializer_list<const Arg*> results,
               const Arg& workspace);

}  // namespace te
