// Times pieces of work in turns: every round runs each step once, one behind the other on one stream, and an event
// between neighbours takes the time.
//
// CUDA events rather than nvbench: what is compared must alternate, so that both sides see the same clocks (a card at
// its power limit changes them within a second), where nvbench finishes one benchmark before it begins the next; whole
// calls of several launches, and single stages of them, are timed as they run in a host, without flushed caches or a
// locked clock; and it costs no dependency. The device never waits for the host: the next rounds are queued while one
// runs.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "bench_device.h"
#include "terminal.h"

namespace vcattn::cli {

struct BenchStep {
  std::vector<double>* milliseconds;  // takes one number a round; null: not wanted
  std::function<void()> launch;       // on the stream; throws on failure
};

// Runs `steps` for one round that is not counted, and `rounds` more. Advances `progress` by one each. Appends readings
// of the clocks: one before the work, some while it runs, one right after it.
void run_rounds(const std::vector<BenchStep>& steps, int rounds, const Stream& stream, const Clocks& clocks,
                std::vector<ClockReading>& readings, Progress& progress);

// A result with one case for each shape, under a progress bar.
BenchResult measure_shapes(const BenchOptions& options, const Card& card,
                           const std::function<BenchCase(const BenchShape&, Progress&)>& measure);

}  // namespace vcattn::cli
