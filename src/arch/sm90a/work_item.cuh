// What a cluster works on at a time: a block of queries of one head.
#pragma once

#include "arch/sm90a/operands.h"

namespace vcattn::sm90a {

// Work items are numbered head by head. One register holds the number during the loop over keys; the rest is worked out
// where it is needed.
class WorkItem {
 public:
  __device__ __forceinline__ explicit WorkItem(int number) : number_(number) {}
  __device__ __forceinline__ int number() const { return number_; }
  __device__ __forceinline__ int head(const QuantizedQkv& qkv) const { return number_ / qkv.blocks; }
  // Among those of the head, all sequences.
  __device__ __forceinline__ int block(const QuantizedQkv& qkv) const { return number_ % qkv.blocks; }
  __device__ __forceinline__ int kv_head(const QuantizedQkv& qkv) const {
    return head(qkv) / (qkv.num_heads / qkv.num_heads_kv);
  }
  // Index of the sequence that the block belongs to: the last one that starts at or before it.
  __device__ __forceinline__ int sequence(const QuantizedQkv& qkv) const {
    return last_starting_at(qkv.sequences, qkv.num_sequences, &Sequence::q_block, block(qkv));
  }

 private:
  int number_;
};

}  // namespace vcattn::sm90a
