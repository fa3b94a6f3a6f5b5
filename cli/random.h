// Random numbers that are the same with every compiler, standard library and machine: bits by SplitMix64 (Steele, Lea
// and Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014), normal numbers by Marsaglia's polar method
// with a logarithm of its own, since std::log and the distributions of <random> differ between libraries.
#pragma once

#include <cstdint>
#include <initializer_list>

namespace vcattn::cli {

class Random {
 public:
  explicit Random(uint64_t state) : state_(state) {}
  // One of many unrelated streams of `seed`, told apart by `path`: (batch, head, purpose).
  Random(uint64_t seed, std::initializer_list<int64_t> path);

  uint64_t bits();
  double uniform();  // [0, 1), a multiple of 2^-53
  double normal();   // mean 0, variance 1

 private:
  uint64_t state_;
  double spare_ = 0;
  bool has_spare_ = false;
};

}  // namespace vcattn::cli
