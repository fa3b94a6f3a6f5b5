// The smallest of the values that tasks report, whatever their order.
#pragma once

#include <atomic>
#include <cstdint>

namespace vcattn::cpu {

inline void keep_smallest(std::atomic<int64_t>& smallest, int64_t value) {
  int64_t seen = smallest.load(std::memory_order_relaxed);
  while (value < seen && !smallest.compare_exchange_weak(seen, value, std::memory_order_relaxed)) {
  }
}

}  // namespace vcattn::cpu
