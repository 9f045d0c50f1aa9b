// Reads lines "b s t h g d causal", sizes of te_attention_fp8_bwd, from the standard input -> of each line
// what is wrong with its parts, or "-", "|", and the heads of rows in each. cuDNN is a function here that
// mixes bytes, in the layouts of attention_fp8_plan.cc: results in parts are those of one call.
#include <algorithm>
#include <cstring>
#include <iostream>
#include <map>
#include <sstream>
#include <vector>

#include "attention/attention_fp8.cc"

namespace te {
namespace {

constexpr int64_t kPlanBytes = 64;  // of workspace, a head
std::map<std::string, Fp8Attention> described;
std::vector<Fp8Attention> ran;
std::vector<std::string> found;  // plans
std::string wrong;

int64_t PlanBytes(const Fp8Attention& a) { return kPlanBytes * a.b * a.h; }

// Gradients that depend on all that belongs to their head, and amaxes, which are written over.
void Mix(const Fp8Attention& a, GraphPointers& at) {
  const auto bytes = [&](int64_t uid) { return static_cast<uint8_t*>(at.at(uid)); };
  const auto query = [&](int64_t row, int64_t head, int64_t token) {
    return ((row * a.s + token) * a.line_h + head) * a.d;
  };
  const auto key = [&](int64_t row, int64_t head, int64_t token) {
    return ((row * a.t + token) * a.line_g + head) * a.d;
  };
  float amaxes[kAmaxes]{};
  for (int64_t row = 0; row < a.b; ++row)
    for (int64_t group = 0; group < a.g; ++group) {
      unsigned keys = 0, queries = 0;
      for (int64_t i = 0; i < a.t * a.d; ++i) {
        const int64_t k = key(row, group, i / a.d) + i % a.d;
        keys = keys * 31 + bytes(kK)[k] + 7 * bytes(kV)[k];
      }
      for (int64_t head = group * (a.h / a.g); head < (group + 1) * (a.h / a.g); ++head)
        for (int64_t i = 0; i < a.s * a.d; ++i) {
          const int64_t q = query(row, head, i / a.d) + i % a.d;
          const int64_t of_lse = (row * a.line_h + head) * a.s + i / a.d;
          const unsigned mixed = bytes(kQ)[q] + 3 * bytes(kOut)[q] + 5 * bytes(kDOut)[q] +
                                 unsigned(static_cast<float*>(at.at(kLse))[of_lse]);
          queries = queries * 31 + mixed;
          amaxes[0] = std::max<float>(amaxes[0], bytes(kDQ)[q] = uint8_t(mixed + keys));
          amaxes[3] = std::max<float>(amaxes[3], mixed % 1021);
        }
      for (int64_t i = 0; i < a.t * a.d; ++i) {
        const int64_t k = key(row, group, i / a.d) + i % a.d;
        amaxes[1] = std::max<float>(amaxes[1], bytes(kDK)[k] = uint8_t(bytes(kK)[k] + queries));
        amaxes[2] = std::max<float>(amaxes[2], bytes(kDV)[k] = uint8_t(bytes(kV)[k] * 3 + queries));
      }
    }
  for (int64_t i = 0; i < kAmaxes; ++i) *static_cast<float*>(at.at(kAmaxDQ + i)) = amaxes[i];
}

}  // namespace

GraphRecipe Fp8AttentionRecipe(const Fp8Attention& a) {
  std::ostringstream text;
  for (const int64_t n : {a.b, a.s, a.t, a.h, a.g, a.d, a.line_h, a.line_g}) text << n << ' ';
  described[text.str()] = a;
  return {text.str(), nullptr};
}

Status FindGraph(cudaStream_t, const GraphRecipe& recipe, int64_t*) {
  found.push_back(recipe.text);
  return {};
}

int64_t GraphWorkspace(const GraphRecipe& recipe) { return PlanBytes(described.at(recipe.text)); }

Status RunGraph(cudaStream_t, const GraphRecipe& recipe, GraphPointers at, void* workspace, int64_t bytes) {
  const Fp8Attention& a = described.at(recipe.text);
  if (std::find(found.begin(), found.end(), recipe.text) == found.end()) wrong += " a plan that is not made;";
  if (bytes < PlanBytes(a)) wrong += " too few bytes of workspace;";
  std::memset(workspace, 0xff, PlanBytes(a));
  for (int64_t i = 0; i < kBackwardScales; ++i)
    if (*static_cast<float*>(at.at(kScales + i)) != float(i)) wrong += " another scale;";
  Mix(a, at);
  ran.push_back(a);
  return {};
}

Status FinishPartials(cudaStream_t, const Ending& first, const Ending& second, const Tensor&, const Tensor&) {
  for (const Ending* ending : {&first, &second}) {
    const auto* partials = static_cast<const float*>(ending->partials.data);
    *static_cast<float*>(ending->result.data) =
        *std::max_element(partials, partials + ending->partials.count());
  }
  return {};
}

namespace {

void Check(int64_t b, int64_t s, int64_t t, int64_t h, int64_t g, int64_t d, bool causal) {
  const int64_t query[] = {b, s, h, d}, key[] = {b, t, g, d}, lse[] = {b, h, s}, scales[] = {kBackwardScales};
  const int64_t size[] = {AttentionFp8Workspace("bwd", true, b, s, t, h, g, d, causal, 1)};
  constexpr int64_t kGuard = 256;
  std::vector<std::vector<uint8_t>> arrays;
  arrays.reserve(32);
  const auto make = [&](Type type, const int64_t* sizes, int64_t rank) {
    Tensor made{nullptr, type, sizes, rank};
    arrays.emplace_back(made.bytes() + kGuard);
    for (size_t i = 0; i < arrays.back().size(); ++i) arrays.back()[i] = uint8_t(i * 2654435761u >> 13);
    made.data = arrays.back().data();
    return made;
  };
  Tensor in[] = {make(F8E5M2, query, 4), make(F8E4M3FN, query, 4), make(F8E4M3FN, key, 4),
                 make(F8E4M3FN, key, 4), make(F8E4M3FN, query, 4), make(F32, lse, 3),
                 make(F32, scales, 1)};
  for (int64_t i = 0; i < in[5].count(); ++i) static_cast<float*>(in[5].data)[i] = float(i % 1009);
  for (int64_t i = 0; i < kBackwardScales; ++i) static_cast<float*>(in[6].data)[i] = float(i);
  const auto results = [&] {
    std::vector<Tensor> out = {make(F8E5M2, query, 4), make(F8E5M2, key, 4), make(F8E5M2, key, 4)};
    for (int64_t i = 0; i < kAmaxes; ++i) out.push_back(make(F32, nullptr, 0));
    return out;
  };
  std::vector<Tensor> got = results(), want = results();
  const Tensor workspace = make(U8, size, 1);
  const std::vector<uint8_t> guard(arrays.back().end() - kGuard, arrays.back().end());

  found.clear(), ran.clear(), wrong.clear();
  for (const Stage stage : {Stage::kInitialize, Stage::kExecute}) {
    const auto arg = [&](int i) { return Arg{in[i]}; };
    const auto ret = [&](int i) { return Ret{got[i]}; };
    const Status status =
        LaunchAttentionFp8Bwd(stage, nullptr, arg(0), arg(1), arg(2), arg(3), arg(4), arg(5), arg(6), ret(0),
                              ret(1), ret(2), ret(3), ret(4), ret(5), ret(6), Ret{workspace}, causal, 1);
    if (status.failure()) wrong += " " + status.message + ";";
  }
  Fp8Attention whole{true, true, b, s, t, h, g, d, causal, 1};
  GraphPointers at = {{kDOut, in[0].data}, {kQ, in[1].data},    {kK, in[2].data},
                      {kV, in[3].data},    {kOut, in[4].data},  {kLse, in[5].data},
                      {kDQ, want[0].data}, {kDK, want[1].data}, {kDV, want[2].data}};
  for (int64_t i = 0; i < kAmaxes; ++i) at[kAmaxDQ + i] = want[3 + i].data;
  if (whole.empty())
    for (const Tensor& each : want) std::memset(each.data, 0, each.bytes());
  else
    Mix(whole, at);
  for (size_t i = 0; i < got.size(); ++i)
    if (std::memcmp(got[i].data, want[i].data, got[i].bytes() + kGuard))
      wrong += " result " + std::to_string(i) + ";";
  if (!std::equal(guard.begin(), guard.end(), static_cast<uint8_t*>(workspace.data) + size[0]))
    wrong += " written behind the workspace;";
  std::cout << (wrong.empty() ? "-" : wrong) << '|';
  for (const Fp8Attention& part : ran) std::cout << ' ' << part.b * part.h;
  std::cout << '\n';
}

}  // namespace
}  // namespace te

extern "C" cudaError_t cudaMemsetAsync(void* p, int value, size_t bytes, cudaStream_t) {
  return std::memset(p, value, bytes), cudaSuccess;
}
extern "C" const char* cudaGetErrorString(cudaError_t) { return "no GPU"; }
extern "C" cudaError_t cudaGetLastError() { return cudaSuccess; }
extern "C" cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
extern "C" cudaError_t cudaDeviceGetAttribute(int*, cudaDeviceAttr, int) { return cudaErrorNoDevice; }

int main() {
  int64_t b, s, t, h, g, d;
  bool causal;
  while (std::cin >> b >> s >> t >> h >> g >> d >> causal) te::Check(b, s, t, h, g, d, causal);
}
