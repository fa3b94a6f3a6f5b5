// Random q, k and v with the structure that makes or breaks low-bit attention, in stated amounts. Plain Gaussian
// tensors flatter: they have no channel bias, no clusters and flat softmax rows.
//
// All tokens of a (batch, KV head) carry a cluster label, drawn token by token and so not local in space (like colours
// and textures), and, inside the video grid, a random field that is smooth in space and time. V, K and Q each see both
// through vectors of their own, so that tokens of one kind or place attend to each other.
//
// The random draws are the same everywhere (random.h). How V's parts are weighted follows from what the library's
// k-means does with them.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "io/tensor_file.h"
#include "vcattn/vcattn.h"

namespace vcattn::cli {

// Share of V's energy (sum of squares) that the means of 128 rows remove, in each order of the tokens.
struct EnergyShares {
  double sequence = 0;
  std::optional<double> cube;  // static 2 x 8 x 8 cubes; only with a video grid
  double kmeans = 0;           // k-means as in the recipe vsmooth8
};

struct SynthOptions {
  int64_t batch = 1, heads = 1, heads_kv = 1;
  int64_t tokens = 0;           // in all
  vcattn_video_grid grid = {};  // frames 0: no video
  int64_t head_dim = 128;
  vcattn_dtype dtype = VCATTN_BF16;
  uint64_t seed = 0;
  int64_t clusters = 32;  // labels; their sizes are uniform on the simplex
  EnergyShares energy;
  double outlier_fraction = 0.001;  // of the tokens, in V
  double outlier_scale = 8;         // their noise, relative to the others'
  double k_bias = 2;     // length of K's mean over tokens, relative to the RMS length of what is left without it
  double sharpness = 2;  // standard deviation of softmax_scale * q . k over the keys, RMS over rows
};

struct SynthHead {
  int64_t batch, head_kv;
  EnergyShares reached;   // measured on V as stored
  double effective_keys;  // exp(entropy) of softmax rows, geometric mean over sampled rows of its query heads
};

struct SynthResult {
  io::TensorFile file;  // q, k, v, all [batch, heads, tokens, head_dim]; metadata
  std::vector<SynthHead> heads;
};

// The largest difference between an asked and a reached share that is accepted.
inline constexpr double kShareTolerance = 0.005;

// Throws std::runtime_error that names the condition where the request contradicts itself or cannot be reached.
// `head_done` is called after each (batch, KV head).
SynthResult synthesize(const SynthOptions& options, const std::function<void()>& head_done);

}  // namespace vcattn::cli
