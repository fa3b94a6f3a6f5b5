// Cuts typed arrays out of one block of memory. Without a block it only counts, so that the size asked for and the
// memory used come from the same code.
#pragma once

#include <cstddef>
#include <cstdint>

namespace vcattn {

// Quotient of non-negative integers, rounded up.
constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

class Arena {
 public:
  static constexpr int64_t kAlignment = 64;

  explicit Arena(std::byte* base) : base_(base) {}

  // `count` elements, 64-byte aligned, uninitialised; null where the arena only counts.
  template <typename T>
  T* take(int64_t count) {
    const size_t offset = used_;
    used_ += static_cast<size_t>(ceil_div(count * static_cast<int64_t>(sizeof(T)), kAlignment)) * kAlignment;
    return base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + offset);
  }

  size_t used() const { return used_; }

 private:
  std::byte* base_;
  size_t used_ = 0;
};

}  // namespace vcattn
