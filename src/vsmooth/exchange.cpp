#include "vsmooth/exchange.h"

#include <tbb/parallel_for.h>

#include <algorithm>

#include "numerics/attention_math.h"
#include "vsmooth/row_ops.h"
#include "vsmooth/sort_key.h"

namespace vcattn::vsmooth {
namespace {

// As many rounds again would add about a tenth of the energy that these do (docs/algorithm.md).
constexpr int kBlockRounds = 4;
constexpr int kHalvesRounds = 3;

struct Interval {
  int64_t begin, end;
  int64_t size() const { return end - begin; }
};

void add_mean(const Tokens& tokens, const int32_t* set, int64_t size, float sign, float* direction) {
  float sums[VCATTN_MAX_HEAD_DIM] = {};
  for (int64_t i = 0; i < size; ++i) {
    const float* x = tokens.row(set[i]);
    for (int64_t d = 0; d < tokens.stride; ++d) sums[d] += x[d];
  }
  const float factor = sign / static_cast<float>(size);
  for (int64_t d = 0; d < tokens.stride; ++d) direction[d] += sums[d] * factor;
}

// Both sets keep the relative order of their tokens. The elements of the scratch from `first` on are this pair's.
void exchange(const Tokens& tokens, Interval a, Interval b, int64_t first, const ExchangeScratch& scratch,
              int32_t* permutation) {
  const int64_t size = a.size() + b.size();
  float* projections = scratch.projections + first;
  uint64_t* keys = scratch.keys + first;
  int32_t* before = scratch.tokens + first;
  std::copy(permutation + a.begin, permutation + a.end, before);
  std::copy(permutation + b.begin, permutation + b.end, before + a.size());

  float direction[VCATTN_MAX_HEAD_DIM] = {};
  add_mean(tokens, before, a.size(), -1.0f, direction);
  add_mean(tokens, before + a.size(), b.size(), 1.0f, direction);
  for (int64_t i = 0; i < size; ++i) {
    projections[i] = dot(tokens.row(before[i]), direction, tokens.stride);
    keys[i] = sort_key(projections[i], static_cast<uint32_t>(i));
  }
  std::nth_element(keys, keys + a.size() - 1, keys + size);
  const uint64_t last_of_a = keys[a.size() - 1];
  int32_t* next_a = permutation + a.begin;
  int32_t* next_b = permutation + b.begin;
  for (int64_t i = 0; i < size; ++i) {
    *(sort_key(projections[i], static_cast<uint32_t>(i)) <= last_of_a ? next_a : next_b)++ = before[i];
  }
}

// The sets of `rows` tokens that begin at multiples of `rows`, from set `first` on in pairs.
void exchange_round(const Tokens& tokens, int64_t rows, int64_t first, const ExchangeScratch& scratch,
                    int32_t* permutation) {
  const int64_t sets = (tokens.count + rows - 1) / rows;
  tbb::parallel_for(int64_t{0}, (sets - first) / 2, [&](int64_t pair) {
    const int64_t begin = (first + 2 * pair) * rows, middle = begin + rows;
    exchange(tokens, {begin, middle}, {middle, std::min(middle + rows, tokens.count)}, begin, scratch, permutation);
  });
}

}  // namespace

BlockSets::BlockSets(int64_t count, int32_t sets)
    : count_(count), blocks_((count + kBlockN - 1) / kBlockN), sets_(std::min<int64_t>(sets, blocks_)) {}

int64_t BlockSets::begin(int64_t set) const { return set == sets_ ? count_ : set * blocks_ / sets_ * kBlockN; }

int64_t BlockSets::pair_capacity() const { return sets_ == 0 ? 0 : (blocks_ + sets_ - 1) / sets_ * 2 * kBlockN; }

int64_t BlockSets::exchange_capacity() const { return (sets_ + 1) / 2 * pair_capacity(); }

RoundRobin::Pair RoundRobin::meeting(int64_t round, int64_t pair) const {
  // The last player meets each of the others in turn; those others meet where their numbers add up to 2 round, modulo
  // their number, which is odd.
  const int64_t a = (round + pair) % rounds();
  const int64_t b = pair == 0 ? players - 1 : (round - pair + rounds()) % rounds();
  return {std::min(a, b), std::max(a, b)};
}

void exchange_all_sets(const Tokens& tokens, const BlockSets& sets, const ExchangeScratch& scratch,
                       int32_t* permutation) {
  const RoundRobin tournament(sets.sets());
  for (int64_t round = 0; round < tournament.rounds(); ++round) {
    tbb::parallel_for(int64_t{0}, tournament.pairs(), [&](int64_t pair) {
      const auto [a, b] = tournament.meeting(round, pair);
      if (b == sets.sets()) return;
      exchange(tokens, {sets.begin(a), sets.begin(a + 1)}, {sets.begin(b), sets.begin(b + 1)},
               pair * sets.pair_capacity(), scratch, permutation);
    });
  }
}

void exchange_neighbours(const Tokens& tokens, const ExchangeScratch& scratch, int32_t* permutation) {
  for (int round = 0; round < kBlockRounds; ++round) {
    exchange_round(tokens, kBlockN, round % 2, scratch, permutation);
  }
  for (int64_t rows = kBlockN / 2; rows >= kMinMeanRows; rows /= 2) {
    for (int round = 0; round < kHalvesRounds; ++round) exchange_round(tokens, rows, 0, scratch, permutation);
  }
}

}  // namespace vcattn::vsmooth
