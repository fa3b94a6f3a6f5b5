// Sort keys that order tokens by a float and, where floats are equal, by position: all keys of a list differ, so every
// sorting algorithm gives the same result. NaN has a place in the order too, which a comparison of floats would lack.
#pragma once

#include <bit>
#include <cstdint>

namespace vcattn::vsmooth {

inline uint64_t sort_key(float value, uint32_t position) {
  constexpr uint32_t kSign = 0x80000000u;
  const uint32_t bits = std::bit_cast<uint32_t>(value + 0.0f);  // -0 becomes +0: they are equal
  const uint32_t ascending = (bits & kSign) != 0 ? ~bits : bits | kSign;
  return uint64_t{ascending} << 32 | position;
}

inline uint32_t key_position(uint64_t key) { return static_cast<uint32_t>(key); }

}  // namespace vcattn::vsmooth
