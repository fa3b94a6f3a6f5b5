#include "random.h"

#include <cmath>

namespace vcattn::cli {
namespace {

constexpr uint64_t kGoldenGamma = 0x9E3779B97F4A7C15;  // SplitMix64's step, 2^64 / golden ratio

// SplitMix64's output function.
uint64_t mix(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
  return z ^ (z >> 31);
}

// Natural logarithm of x in (0, 1), from operations that IEEE 754 rounds correctly: with x = m 2^e, m in
// [sqrt(1/2), sqrt(2)) and t = (m - 1) / (m + 1), log x = e log 2 + 2 (t + t^3/3 + t^5/5 + ...), where |t| < 0.172.
double reproducible_log(double x) {
  constexpr double kSqrtHalf = 0.7071067811865476, kLog2 = 0.6931471805599453;
  constexpr int kTerms = 10;  // the next one is below 2^-53
  int exponent;
  double m = std::frexp(x, &exponent);
  if (m < kSqrtHalf) {
    m *= 2;
    --exponent;
  }
  const double t = (m - 1) / (m + 1), t2 = t * t;
  double series = 0;
  for (int i = kTerms - 1; i >= 0; --i) series = series * t2 + 1.0 / (2 * i + 1);
  return exponent * kLog2 + 2 * t * series;
}

}  // namespace

Random::Random(uint64_t seed, std::initializer_list<int64_t> path) : state_(mix(seed + kGoldenGamma)) {
  for (const int64_t step : path) state_ = mix(state_ + (static_cast<uint64_t>(step) + 1) * kGoldenGamma);
}

uint64_t Random::bits() { return mix(state_ += kGoldenGamma); }

double Random::uniform() { return static_cast<double>(bits() >> 11) * 0x1p-53; }

double Random::normal() {
  if (has_spare_) {
    has_spare_ = false;
    return spare_;
  }
  double x, y, s;
  do {
    x = 2 * uniform() - 1;
    y = 2 * uniform() - 1;
    s = x * x + y * y;
  } while (s >= 1 || s == 0);
  const double factor = std::sqrt(-2 * reproducible_log(s) / s);
  spare_ = y * factor;
  has_spare_ = true;
  return x * factor;
}

}  // namespace vcattn::cli
