#include "bench_rounds.h"

#include <chrono>
#include <deque>
#include <optional>

namespace vcattn::cli {
namespace {

using Time = std::chrono::steady_clock;

// Reading takes NVML up to some milliseconds, in which the queue would run empty where rounds are short.
constexpr auto kBetweenReadings = std::chrono::milliseconds(100);

// Rounds that wait behind the one that runs.
constexpr int kQueuedRounds = 2;

// The events of one round: before the first step, and behind each.
using Round = std::deque<Event>;

void enqueue(const std::vector<BenchStep>& steps, const Stream& stream, Round& round) {
  round.emplace_back().record(stream);
  for (const BenchStep& step : steps) {
    step.launch();
    round.emplace_back().record(stream);
  }
}

}  // namespace

void run_rounds(const std::vector<BenchStep>& steps, int rounds, const Stream& stream, const Clocks& clocks,
                std::vector<ClockReading>& readings, Progress& progress) {
  const bool reads = clocks.source().why_not.empty();
  stream.wait();
  if (reads) readings.push_back(clocks.read());
  std::deque<Round> queued;
  std::optional<Time::time_point> last_reading;
  int enqueued = 0;
  for (int round = 0; round <= rounds; ++round) {
    for (; enqueued <= rounds && enqueued <= round + kQueuedRounds; ++enqueued) {
      enqueue(steps, stream, queued.emplace_back());
    }
    const Round& events = queued.front();
    events.front().wait();  // its first step runs
    if (reads && round > 0 && (!last_reading || Time::now() - *last_reading > kBetweenReadings)) {
      readings.push_back(clocks.read());
      last_reading = Time::now();
    }
    events.back().wait();
    for (size_t i = 0; round > 0 && i < steps.size(); ++i) {
      if (steps[i].milliseconds != nullptr) {
        steps[i].milliseconds->push_back(events[i + 1].milliseconds_since(events[i]));
      }
    }
    queued.pop_front();
    progress.advance();
  }
  if (reads) readings.push_back(clocks.read());
}

BenchResult measure_shapes(const BenchOptions& options, const Card& card,
                           const std::function<BenchCase(const BenchShape&, Progress&)>& measure) {
  BenchResult result = {card.machine(), options.rounds, {}};
  Progress progress("bench", static_cast<int64_t>(options.shapes.size()) * (options.rounds + 1));
  for (const BenchShape& shape : options.shapes) {
    progress.show(shape.name);
    result.cases.push_back(measure(shape, progress));
  }
  return result;
}

}  // namespace vcattn::cli
