// In builds without nvcc the command exists, and says why it measures nothing.
#include <stdexcept>

#include "bench.h"

namespace vcattn::cli {
namespace {

[[noreturn]] void refuse() { throw std::runtime_error(why_no_sm90a()); }

}  // namespace

BenchResult bench_attention(const BenchOptions&) { refuse(); }
BenchResult bench_call(const BenchOptions&) { refuse(); }

}  // namespace vcattn::cli
