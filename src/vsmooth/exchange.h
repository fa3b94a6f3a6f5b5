// Exchange of tokens between two sets, the step that refines an order of the tokens. With fixed means m_a and m_b, the
// split of both sets' tokens into sets of the same two sizes that has the least sum of squared distances gives the
// first set those with the smallest x.(m_b - m_a). So no exchange lowers the energy that the sets' means remove, and
// sets that are whole blocks stay whole blocks: balanced 2-means, at the cost of two passes over the tokens.
#pragma once

#include <cstdint>

#include "core/arena.h"
#include "vsmooth/grouping.h"

namespace vcattn::vsmooth {

// Arrays of one element per token of all the pairs that exchange at the same time.
struct ExchangeScratch {
  ExchangeScratch(Arena& arena, int64_t capacity)
      : projections(arena.take<float>(capacity)),
        keys(arena.take<uint64_t>(capacity)),
        tokens(arena.take<int32_t>(capacity)) {}

  float* projections;  // x.(m_b - m_a)
  uint64_t* keys;      // sort_key
  int32_t* tokens;     // the pair's tokens as they were
};

// Equal sets of whole blocks of kBlockN tokens, as long as the blocks go round: set j begins with block
// floor(j blocks / sets), so sizes differ by at most one block. The last block of the last set may be short.
class BlockSets {
 public:
  BlockSets(int64_t count, int32_t sets);
  int64_t sets() const { return sets_; }  // min(sets asked for, blocks)
  int64_t begin(int64_t set) const;       // begin(sets()) is the number of tokens
  int64_t pair_capacity() const;          // upper bound of the tokens of two sets
  int64_t exchange_capacity() const;      // what exchange_all_sets needs of ExchangeScratch; at least count

 private:
  int64_t count_, blocks_, sets_;
};

// Who meets whom in a round-robin tournament by the circle method: in rounds 0 .. rounds() - 1, pairs 0 .. pairs() - 1
// of different sets, each two sets once. With an odd number of sets one sits out in each round, as {set, sets}.
struct RoundRobin {
  explicit RoundRobin(int64_t number_of_sets) : sets(number_of_sets), players(sets + sets % 2) {}
  int64_t rounds() const { return players > 0 ? players - 1 : 0; }
  int64_t pairs() const { return players / 2; }
  struct Pair {
    int64_t a, b;  // a < b
  };
  Pair meeting(int64_t round, int64_t pair) const;

  int64_t sets, players;
};

// Every two sets exchange once.
void exchange_all_sets(const Tokens& tokens, const BlockSets& sets, const ExchangeScratch& scratch,
                       int32_t* permutation);

// Neighbours exchange: blocks of 128 tokens in rounds that alternate between the pairs (0,1), (2,3), ... and (1,2),
// (3,4), ...; then the halves of each block, then the halves of those, several times each. The scratch has the
// capacity for all tokens.
void exchange_neighbours(const Tokens& tokens, const ExchangeScratch& scratch, int32_t* permutation);

}  // namespace vcattn::vsmooth
