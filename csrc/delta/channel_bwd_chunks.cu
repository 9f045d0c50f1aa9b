// The gradients of the chunks of a slab where channels have gates, of the states before them and the
// gradients to those behind: a CTA has a chunk of the heads of values that share a key, one after the other,
// and of each first all values, for how much tokens see of each other, and then 64 channels of keys after the
// other.

#include "base/check.h"
#include "base/launch.h"
#include "delta/channel_bwd_bands.cuh"
#include "delta/delta_bwd.cuh"

namespace te::delta {
namespace {

// kSeveral: several heads of values share a key, so dq and dk are sums over them.
template <int kD, bool kRuns, bool kSeveral>
struct ChannelGradients : ChannelBands<kRuns> {
  using Base = ChannelBands<kRuns>;
  using Base::Band, Base::Column, Base::Key, Base::Query, Base::s, Base::Side, Base::Token;
  using typename Base::Block;
  static constexpr int kParts = kD / kPart, kPitch = ChannelSums<kPart>::kPitch;
  using Columns = Block[kSide / 16];  // [kBand, kSide]
  using Scores = float[4][4];         // [kBand, 2 * 16]
  // What of the gradients of a thread's two rows lies along the tokens.
  struct Along {
    float queries[2], keys[2];
  };
  const GradArgs& a;
  const int row, chunk, group;
  Columns dq, dk;  // of a part's channels, but for lengths: where these are sums over heads
  int part = 0, head = 0;

  // The blocks of scores that a warp has: the later ones are seen by fewer.
  __device__ __forceinline__ static int From(int i) { return 2 * i + Side(); }
  __device__ __forceinline__ int Values() const { return a.again.e; }
  __device__ __forceinline__ int First() const { return chunk * kChunk; }
  __device__ __forceinline__ int Rows() const { return a.of.s - First(); }
  __device__ __forceinline__ int64_t OfHead() const {
    return (int64_t(row) * a.of.s + First()) * a.of.h + head;
  }
  __device__ __forceinline__ int64_t OfKey() const {
    return ((int64_t(row) * a.of.s + First()) * a.of.g + group) * a.of.d;
  }
  __device__ __forceinline__ const ChannelWeights<kD>& Weights() const {
    return static_cast<const ChannelChunk<kD>*>(a.again.of_channels)[a.part.At(row, chunk, head, a.of.h)]
        .weights;
  }

  // 1 over the lengths: two threads have a query, or a key.
  __device__ __forceinline__ void Lengths() {
    const int token = threadIdx.x / 4, half = threadIdx.x % 2;
    const bool of_key = threadIdx.x / 2 % 2;
    const Bf16* const from = (of_key ? a.of.k : a.of.q) + OfKey() + int64_t(token) * a.of.g * a.of.d;
    float sum = 0;
    if (token < Rows())
      for (int i = 8 * half; i < a.of.d; i += 16) {
        const auto eight = Load<8>(from + i);
#pragma unroll
        for (int j = 0; j < 8; ++j) sum += eight[j] * eight[j];
      }
    sum = WarpSum<2>(sum);
    if (half == 0)
      (of_key ? s.key_lengths : s.query_lengths)[token] = a.of.normalize ? rsqrtf(sum + kLengthEpsilon) : 1.f;
  }

  __device__ __forceinline__ int LastOfValues() const { return (Values() - 1) / kSlab * kSlab; }
  // As Tile::Fetch. A thread has 8 columns of two rows.
  __device__ __forceinline__ static void Fetch(Tokens<kPart>& to, const Bf16* from, int64_t stride, int rows,
                                               int columns) {
    constexpr int kNext = kChunk / 2;
    const int row = threadIdx.x / 8, column = threadIdx.x % 8 * 8;
    const Bf16* const p = from + (row * stride + column);
    Bf16* const cell = to.cells + Base::CellOf(row, column);
    const bool is_there = column < columns && row < rows, next = column < columns && row + kNext < rows;
    PrefetchOrZero16(cell, is_there ? p : from, is_there);
    PrefetchOrZero16(cell + kNext * kPart, next ? p + kNext * stride : from, next);
  }
  __device__ __forceinline__ void FetchValues(int first) {
    OfValues& to = s.values;
    const int64_t at = OfHead() * Values() + first, written = a.Written(row, chunk, head, first);
    const int64_t stride = int64_t(a.of.h) * Values();
    const int values = Values() - first;
    Fetch(to.dy, a.back.v + at, stride, Rows(), values);
    Fetch(to.written, a.written + written, stride, Rows(), values);
    Fetch(to.gradients_written, a.gradients_written + written, stride, Rows(), values);
  }
  // Next to values, which stay.
  __device__ __forceinline__ void FetchStates(int first) {
    const int64_t state = a.State(row, chunk, head) + int64_t(first) * a.of.d + part * kPart;
    const int values = Values() - first, channels = a.of.d - part * kPart;
    Fetch(s.states.state, a.states + state, a.of.d, values, channels);
    Fetch(s.states.gradient, a.gradients + state, a.of.d, values, channels);
  }
  __device__ __forceinline__ void FetchKeys() {
    const int64_t at = OfKey() + part * kPart, stride = int64_t(a.of.g) * a.of.d;
    const int channels = a.of.d - part * kPart;
    Fetch(s.q, a.of.q + at, stride, Rows(), channels), Fetch(s.k, a.of.k + at, stride, Rows(), channels);
  }
  __device__ __forceinline__ static void Arrive() {
    CommitPrefetch();
    WaitForPrefetch<0>();
    __syncthreads();
  }

  // Of all values, the first of which are on their way: how the loss depends on what tokens see of each
  // other, on values, and on betas through these. The last ones stay, and states are on their way to them.
  __device__ __forceinline__ void OfAllValues() {
    Scores queries = {}, keys = {};
    float along = 0;  // of the token that four threads share: v times the gradient to what it writes
#pragma unroll 1
    for (int first = 0;; first += kSlab) {
      TwoOfValues v{};
      LoadValues(v, first);  // on their way meanwhile
      Arrive();
      const bool is_last = first == LastOfValues();
      if (is_last) FetchStates(first);
      const int rows = Base::CellOfA(),
                right = Base::CellOf(Lane() % 8 + Lane() / 16 * 8, Lane() / 8 % 2 * 8);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (From(i) > Band()) continue;
        const int from = right + From(i) * Base::kOfBand;
#pragma unroll
        for (int k = 0; k < kSlab; k += 16) {
          uint32_t dy[4], gradients_written[4], b[4];
          LoadMatrices<false>(dy, s.values.dy.cells + (rows ^ k));
          LoadMatrices<false>(gradients_written, s.values.gradients_written.cells + (rows ^ k));
          LoadMatrices<false>(b, s.values.written.cells + (from ^ k));
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            MultiplyAdd<false>(queries[2 * i + j], dy, b[2 * j], b[2 * j + 1]);
            MultiplyAdd<false>(keys[2 * i + j], gradients_written, b[2 * j], b[2 * j + 1]);
          }
        }
      }
      WriteValues(v, first, along);
      if (is_last) break;
      __syncthreads();  // none reads them any more
      FetchValues(first + kSlab);
    }
    PutScores(queries, keys);
    along = WarpSum<4>(along);
    if (part == 0 && threadIdx.x % 4 == 0 && int(threadIdx.x) / 4 < Rows()) a.dbeta[AtBetas()] = along;
  }
  // Four threads share a token.
  using TwoOfValues = Vec<Bf16, 8>[kSlab / 32];
  __device__ __forceinline__ static int ColumnOfValues(int j) { return threadIdx.x % 4 * 8 + 32 * j; }
  __device__ __forceinline__ int64_t AtValues(int column) const {
    return (OfHead() + int64_t(threadIdx.x / 4) * a.of.h) * Values() + column;
  }
  __device__ __forceinline__ bool HasValues(int column) const {
    return int(threadIdx.x) / 4 < Rows() && column < Values();
  }
  __device__ __forceinline__ void LoadValues(TwoOfValues& v, int first) const {
#pragma unroll
    for (int j = 0; j < kSlab / 32; ++j) {
      const int column = first + ColumnOfValues(j);
      if (HasValues(column)) v[j] = Load<8>(a.again.v + AtValues(column));
    }
  }
  // dv, beta times the gradient to what a token would write, and that times v.
  __device__ __forceinline__ void WriteValues(const TwoOfValues& v, int first, float& along) {
    const int token = threadIdx.x / 4;
#pragma unroll
    for (int j = 0; j < kSlab / 32; ++j) {
      const int column = first + ColumnOfValues(j);
      if (!HasValues(column)) continue;
      const auto of = Load<8>(s.values.gradients_written.At(token, ColumnOfValues(j)));
      float dv[8];
#pragma unroll
      for (int n = 0; n < 8; ++n) along += of[n] * v[j][n], dv[n] = s.betas[token] * of[n];
      if (part == 0) Store(a.dv + AtValues(column), Round<Bf16, 8>(dv));
    }
  }
  __device__ __forceinline__ void PutScores(const Scores& queries, const Scores& keys) {
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int tile = 0; tile < 2; ++tile)
#pragma unroll
        for (int n = 0; n < 4; n += 2) {
          const int to = Token(n), from = From(i) * kBand + 8 * tile + ssm::ColumnOf(0);
          float query[2] = {}, key[2] = {};
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            const float each = a.of.scale * queries[2 * i + tile][n + j];
            // What a token sees of itself does not depend on gates.
            if (from + j == to) s.own[to] = each;
            if (from + j >= to || !s.runs.AreOne(from + j, to)) continue;
            query[j] = each, key[j] = keys[2 * i + tile][n + j];
          }
          *reinterpret_cast<uint32_t*>(s.of_queries.At(to, from)) = ssm::Pack(query[0], query[1]);
          *reinterpret_cast<uint32_t*>(s.of_keys.At(to, from)) = ssm::Pack(key[0], key[1]);
        }
  }

  // What queries read of the state, keys, and what is left of what tokens write, [kBand, kSide] each; and the
  // product of the state before the chunk and its gradient behind it. From the last values, which are on
  // their way, to the first.
  __device__ __forceinline__ void OfState(Columns& reads, Columns& says, Columns& leaves) {
    float products[8] = {};
#pragma unroll 1
    for (int first = LastOfValues();; first -= kSlab) {
      Arrive();
      const OfValues& values = s.states.values;
      const int rows = Base::CellOfA(), right = Base::CellOfB(Column(0));
#pragma unroll
      for (int k = 0; k < kSlab; k += 16) {
        uint32_t dy[4], gradients_written[4], written[4], b[4];
        LoadMatrices<false>(dy, values.dy.cells + (rows ^ k));
        LoadMatrices<false>(gradients_written, values.gradients_written.cells + (rows ^ k));
        LoadMatrices<false>(written, values.written.cells + (rows ^ k));
#pragma unroll
        for (int i = 0; i < kSide / 16; ++i) {
          const int at = (right ^ 16 * i) + k * kPart;
          LoadMatrices<true>(b, s.states.state.cells + at);
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            MultiplyAdd<false>(reads[i][j], dy, b[2 * j], b[2 * j + 1]);
            MultiplyAdd<false>(says[i][j], gradients_written, b[2 * j], b[2 * j + 1]);
          }
          LoadMatrices<true>(b, s.states.gradient.cells + at);
#pragma unroll
          for (int j = 0; j < 2; ++j) MultiplyAdd<false>(leaves[i][j], written, b[2 * j], b[2 * j + 1]);
        }
      }
      AddProducts(products);
      __syncthreads();  // none reads them any more
      if (first == 0) break;
      FetchValues(first - kSlab), FetchStates(first - kSlab);
    }
    PutProducts(products);
  }
  // A thread has 8 channels; a warp has 4 values of each 32.
  __device__ __forceinline__ void AddProducts(float (&products)[8]) {
    const int column = threadIdx.x % 8 * 8;
#pragma unroll
    for (int value = threadIdx.x / 8; value < kSlab; value += kGradThreads / 8) {
      const auto state = Load<8>(s.states.state.At(value, column));
      const auto gradient = Load<8>(s.states.gradient.At(value, column));
#pragma unroll
      for (int j = 0; j < 8; ++j) products[j] += state[j] * gradient[j];
    }
  }
  __device__ __forceinline__ void PutProducts(const float (&products)[8]) {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      float sum = products[j];
      sum += __shfl_xor_sync(~0u, sum, 8), sum += __shfl_xor_sync(~0u, sum, 16);
      if (Lane() < 8) s.products[WarpIndex()][Lane() * 8 + j] = sum;
    }
  }

  // All that the gradients of 64 channels follow from. `reads` then are what OfGates says.
  __device__ __forceinline__ void OfChannels() {
    Columns reads = {}, says = {}, leaves = {};
    OfState(reads, says, leaves);
    Base::SetBands();
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kSide / 16; ++i) {
      Block later = {};
      float says_of[2] = {};
      Along along{};
      const typename Base::Blocks of{reads[i], says[i], leaves[i], later};
      if (s.is_split[Column(i) / 16])
        Base::SeeInMiddle(Column(i), a.of.scale, of);
      else
        Base::SeeInBands(Column(i), a.of.scale, of);
      Finish(i, of, says_of, along);
      PutRows(s.says[Side()], says_of, i > 0);
      if constexpr (!kSeveral) PutAlong(along, part > 0 || i > 0);
    }
    __syncthreads();  // none reads keys and queries by bands any more
#pragma unroll
    for (int i = 0; i < kSide / 16; ++i)
      Base::EachTwo(Column(i), [&](int token, int channel, int j, int n) {
        *reinterpret_cast<float2*>(s.gates.ends + kPitch * token + channel) =
            make_float2(reads[i][j][n], reads[i][j][n + 1]);
      });
  }
  // The gradients of 16 channels, with what Blocks became.
  __device__ __forceinline__ void Finish(int i, const typename Base::Blocks& of, float (&says_of)[2],
                                         Along& along) {
    __syncwarp();  // none reads the warp's sums of these channels any more
    Base::EachTwo(Column(i), [&](int token, int channel, int j, int n) {
      const int cell = Base::CellOfTwo(Column(i), j, n);
      const float2 keys = Base::Times(s.key_lengths[token], Base::TwoAt(s.k, cell));
      const float2 queries = Base::Times(s.query_lengths[token], Base::TwoAt(s.q, cell));
      const float beta = s.betas[token], own = s.own[token];
      const float key[2] = {keys.x, keys.y}, query[2] = {queries.x, queries.y};
      float key_gets[2], query_gets[2], leaves[2];
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        float& read = of.reads[j][n + m];
        const float leave = of.leaves[j][n + m], said = of.says[j][n + m], off = beta * said;
        const float later = of.later[j][n + m];
        says_of[n / 2] += key[m] * said;
        query_gets[m] = read + own * key[m], key_gets[m] = later + leave - off + own * query[m];
        read = query[m] * read - key[m] * (off + later), leaves[m] = key[m] * leave;
        if constexpr (kSeveral) dq[i][j][n + m] += query_gets[m], dk[i][j][n + m] += key_gets[m];
      }
      *reinterpret_cast<float2*>(s.sums.of + kPitch * token + channel) = make_float2(leaves[0], leaves[1]);
      if constexpr (!kSeveral) Put(token, channel, n, query_gets, key_gets, query, key, along);
    });
  }

  // The gradients of two neighbours, times 1 over lengths.
  __device__ __forceinline__ void Put(int token, int channel, int n, const float (&query_gets)[2],
                                      const float (&key_gets)[2], const float (&query)[2],
                                      const float (&key)[2], Along& along) const {
    along.queries[n / 2] += query_gets[0] * query[0] + query_gets[1] * query[1];
    along.keys[n / 2] += key_gets[0] * key[0] + key_gets[1] * key[1];
    if (token >= Rows() || part * kPart + channel >= a.of.d) return;
    const int64_t at = OfKey() + int64_t(token) * a.of.g * a.of.d + part * kPart + channel;
    const float by_query = s.query_lengths[token], by_key = s.key_lengths[token];
    *reinterpret_cast<uint32_t*>(a.dq + at) = ssm::Pack(by_query * query_gets[0], by_query * query_gets[1]);
    *reinterpret_cast<uint32_t*>(a.dk + at) = ssm::Pack(by_key * key_gets[0], by_key * key_gets[1]);
  }
  // Of a part's channels and all heads.
  __device__ __forceinline__ void PutAll(Along& along) const {
#pragma unroll
    for (int i = 0; i < kSide / 16; ++i)
      Base::EachTwo(Column(i), [&](int token, int channel, int j, int n) {
        const float2 key = Key(token, channel), query = Query(token, channel);
        Put(token, channel, n, {dq[i][j][n], dq[i][j][n + 1]}, {dk[i][j][n], dk[i][j][n + 1]},
            {query.x, query.y}, {key.x, key.y}, along);
      });
  }
  __device__ __forceinline__ void PutAlong(const Along& along, bool adds) {
    PutRows(s.along[0][Side()], along.queries, adds), PutRows(s.along[1][Side()], along.keys, adds);
  }
  // A value of each of the thread's two rows, summed over the four threads that share them.
  __device__ __forceinline__ static void PutRows(float (&place)[kChunk], const float (&of)[2],
                                                 bool adds = false) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = WarpSum<4>(of[half]);
      float& to = place[Token(2 * half)];
      if (Lane() % 4 == 0) to = adds ? to + sum : sum;
    }
  }

  // A gate is of all that goes past its token: from tokens before it, or the state, to it and later ones, or
  // the state behind the chunk. Of two tokens that is what is summed to the later less what is summed from
  // the earlier. Later runs are left out: their sums are 0 but for roundings. A thread has 16 tokens of a
  // channel.
  __device__ __forceinline__ void WriteGates() {
    const int channel = threadIdx.x % kPart, quarter = threadIdx.x / kPart, first = quarter * kBand;
    float behind = 0, before = 0;
#pragma unroll
    for (int i = 0; i < kBand; ++i) {
      const int at = (first + i) * kPitch + channel;
      if (s.runs.AreOne(first, first + i)) behind += s.gates.ends[at];
      before += s.sums.of[at];
    }
    s.gates.parts[0][quarter][channel] = behind, s.gates.parts[1][quarter][channel] = before;
    __syncthreads();
    const int of_all = part * kPart + channel;
    if (of_all < a.of.d) {
      float product = 0, all = 0, sums[kBand];
      behind = before = 0;
      for (const auto& of_warp : s.products) product += of_warp[channel];
#pragma unroll
      for (int i = 0; i < kQuarters; ++i) {
        all += s.totals[i][channel];
        if (i > quarter && s.runs.AreOne(first + kBand - 1, i * kBand))
          behind += s.gates.parts[0][i][channel];
        if (i < quarter) before += s.gates.parts[1][i][channel];
      }
      // What is left of the state before the chunk, of whatever it is where that is nothing.
      const float through = s.runs.Continues(kLast) ? Weighed(Exp2(all), product) : 0.f;
#pragma unroll
      for (int i = kBand; i-- > 0;) {
        if (i + 1 < kBand && !s.runs.AreOne(first + i, first + i + 1)) behind = 0;
        sums[i] = behind += s.gates.ends[(first + i) * kPitch + channel];
      }
      float* to = a.dgate + (OfHead() + int64_t(first) * a.of.h) * a.of.d + of_all;
      const int64_t stride = int64_t(a.of.h) * a.of.d;
#pragma unroll
      for (int i = 0; i < kBand; ++i, to += stride) {
        if (first + i < Rows()) *to = sums[i] + before + through;
        before += s.sums.of[(first + i) * kPitch + channel];
      }
    }
  }

  // Of 64 channels of keys. A head's scores are still there, where it is the only one.
  __device__ __forceinline__ void RunHead(bool has_scores) {
    __syncthreads();  // none reads keys and queries any more
    FetchKeys();
    FetchValues(has_scores ? LastOfValues() : 0);
    if (has_scores) FetchStates(LastOfValues());
    CommitPrefetch();
    if (threadIdx.x < kChunk) s.betas[threadIdx.x] = Weights().betas[threadIdx.x];
    if (part == 0 && (!kSeveral || head % (a.of.h / a.of.g) == 0)) Lengths();
    s.sums.template Set<kGradThreads>(a.of.gate + OfHead() * a.of.d + part * kPart, int64_t(a.of.h) * a.of.d,
                                      Rows(), a.of.d - part * kPart);
    __syncthreads();
    Base::SetMiddle();
    if (!has_scores) OfAllValues();
    OfChannels();
    __syncthreads();
    WriteGates();
    const int token = threadIdx.x / 4;
    if (threadIdx.x % 4 == 0 && token < Rows()) a.dbeta[AtBetas()] -= s.says[0][token] + s.says[1][token];
  }
  // Of the token that four threads share.
  __device__ __forceinline__ int64_t AtBetas() const { return OfHead() + int64_t(threadIdx.x / 4) * a.of.h; }

  __device__ __forceinline__ static void Clear(Columns& of) {
#pragma unroll
    for (Block& block : of)
#pragma unroll
      for (int j = 0; j < 2; ++j)
#pragma unroll
        for (int n = 0; n < 4; ++n) block[j][n] = 0;
  }

  __device__ __forceinline__ void Run() {
    const int heads = kSeveral ? a.of.h / a.of.g : 1;
    if (threadIdx.x < kChunk) s.runs.Set(a.of, row, First(), threadIdx.x, kChunk);
#pragma unroll 1
    for (part = 0; part < kParts; ++part) {
      if constexpr (kSeveral) Clear(dq), Clear(dk);
#pragma unroll 1
      for (int i = 0; i < heads; ++i) {
        head = group * heads + i;
        RunHead(part > 0 && !kSeveral);
      }
      if constexpr (kSeveral) {
        Along along{};
        PutAll(along), PutAlong(along, part > 0);
      }
    }
    if (!a.of.normalize) return;
    __syncthreads();
    TakeAlong(a.dq, a.of.q, s.along[0], s.query_lengths), TakeAlong(a.dk, a.of.k, s.along[1], s.key_lengths);
  }
  // What a token's length takes away of the gradient, where it is divided by it: what lies along the token.
  __device__ __forceinline__ void TakeAlong(Bf16* of, const Bf16* tokens,
                                            const float (&along)[kSides][kChunk],
                                            const float* lengths) const {
    constexpr int kPieces = kD / 8, kNext = kGradThreads / kPieces, kCount = kChunk / kNext;
    const int first = threadIdx.x / kPieces, channel = threadIdx.x % kPieces * 8;
    const int64_t at = OfKey() + int64_t(first) * a.of.g * a.of.d + channel;
    const int64_t next = int64_t(kNext) * a.of.g * a.of.d;
    const auto is_there = [&](int i) { return first + i * kNext < Rows() && channel < a.of.d; };
    Vec<Bf16, 8> given[kCount] = {}, own[kCount] = {};  // all on their way at the same time
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      if (is_there(i)) given[i] = Load<8>(of + at + i * next), own[i] = Load<8>(tokens + at + i * next);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (!is_there(i)) continue;
      const int token = first + i * kNext;
      const float less = lengths[token] * lengths[token] * (along[0][token] + along[1][token]);
      float out[8];
#pragma unroll
      for (int j = 0; j < 8; ++j) out[j] = given[i][j] - less * own[i][j];
      Store(of + at + i * next, Round<Bf16, 8>(out));
    }
  }
};

template <int kD, bool kRuns, bool kSeveral>
__global__ void __launch_bounds__(kGradThreads, kSeveral ? 1 : 2)
    te_gated_delta_channel_bwd_chunks(const GradArgs a) {
  extern __shared__ uint4 memory[];
  auto& shared = *reinterpret_cast<ChannelGradShared<kRuns>*>(memory);
  LetNextStart();
  AwaitPrevious();
  const int chunk = a.part.first_chunk + int(blockIdx.y);
  const int row = a.part.first_row + int(blockIdx.z);
  ChannelGradients<kD, kRuns, kSeveral>{{shared}, a, row, chunk, int(blockIdx.x)}.Run();
}

template <int kD, bool kRuns, bool kSeveral>
Status Run(cudaStream_t stream, const GradArgs& a, bool early) {
  const auto kernel = te_gated_delta_channel_bwd_chunks<kD, kRuns, kSeveral>;
  constexpr size_t kBytes = sizeof(ChannelGradShared<kRuns>);
  static_assert(kBytes <= 99 * 1024);
  TE_TRY(ssm::AllowShared(kernel, kBytes));
  const dim3 grid(a.of.g, a.part.There(a.of.s), a.part.rows);
  return LaunchBehind(stream, early, kernel, grid, kGradThreads, kBytes, a);
}

}  // namespace

Status RunChannelGradients(cudaStream_t stream, const GradArgs& a, bool early) {
  return ssm::DispatchStates(a.of.d, a.of.runs, [&]<int kD, bool kRuns>() {
    return (a.of.h > a.of.g ? Run<kD, kRuns, true> : Run<kD, kRuns, false>)(stream, a, early);
  });
}

}  // namespace te::delta
