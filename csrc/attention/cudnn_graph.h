// cuDNN graphs: built once for each description and device, then looked up. cudnn_graph.cc.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <unordered_map>

#include "base/status.h"

namespace cudnn_frontend::graph {
class Graph;
}

namespace te {

using GraphPointers = std::unordered_map<int64_t, void*>;  // by the tensors' uid

// A graph before it is built. `text` says all that its plan depends on, begins with the op's name, and stands
// in errors: two graphs of one text are the same graph.
struct GraphRecipe {
  std::string text;
  std::function<void(cudnn_frontend::graph::Graph&)> add;  // data types, tensors and nodes
};

// Finds the graph's plan for the current device, and the bytes of workspace that it needs. The first call
// builds the plan, which loads modules and allocates: `stream` must not be capturing then.
Status FindGraph(cudaStream_t stream, const GraphRecipe& recipe, int64_t* workspace = nullptr);

// Enqueues the graph: no allocation, no synchronization.
Status RunGraph(cudaStream_t stream, const GraphRecipe& recipe, GraphPointers pointers, void* workspace,
                int64_t workspace_bytes);

// FindGraph for a question from Python, which has no stream. Throws std::runtime_error with cuDNN's reason if
// there is no plan.
int64_t GraphWorkspace(const GraphRecipe& recipe);

}  // namespace te
