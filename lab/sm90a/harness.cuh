// Inputs, slow preprocessing, FP64 rows and timing for the lab's attention kernels.
#pragma once
#include <cuda_fp8.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "attention.cuh"

#define CHECK(x) do { cudaError_t e_ = (x); if (e_ != cudaSuccess) { printf("CUDA: %s, line %d\n", cudaGetErrorString(e_), __LINE__); exit(1); } } while (0)

namespace lab {
using bf16 = __nv_bfloat16;

__device__ __host__ inline uint32_t hash(uint32_t x) { x ^= x >> 16; x *= 0x7feb352dU; x ^= x >> 15; x *= 0x846ca68bU; x ^= x >> 16; return x; }
__device__ inline float normal(uint32_t i, uint32_t seed) {
  float u = (hash(i * 2654435761u + seed) + 1.f) / 4294967808.f, v = hash(i * 2246822519u + seed * 7 + 13) / 4294967296.f;
  return sqrtf(-2.f * logf(u)) * cosf(6.2831853f * v);
}
// clustered: every 128 tokens share an offset of deviation 1.
__global__ void fill(bf16* x, size_t n, uint32_t seed, float scale, bool clustered, int seqlen) {
  for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < n; i += size_t(gridDim.x) * blockDim.x) {
    float v = normal(uint32_t(i), seed) * scale;
    if (clustered) v += normal(uint32_t(((i / 128) % seqlen / 128) * 128 + i % 128), seed + 77);
    x[i] = __float2bfloat16(v);
  }
}
__device__ inline int swizzled(int row, int byte) { return row * 128 + ((((byte >> 4) ^ (row & 7)) << 4) | (byte & 15)); }
__device__ inline float block_max(float a, float* red) {
  for (int o = 16; o; o >>= 1) a = fmaxf(a, __shfl_xor_sync(~0u, a, o));
  if ((threadIdx.x & 31) == 0) red[threadIdx.x >> 5] = a;
  __syncthreads();
  return fmaxf(fmaxf(red[0], red[1]), fmaxf(red[2], red[3]));
}
__global__ void prepare_q(const bf16* x, uint8_t* q, float* factor, int seqlen, int padded, float units) {
  __shared__ float red[4];
  int h = blockIdx.y, row = blockIdx.x, d = threadIdx.x;
  float v = row < seqlen ? __bfloat162float(x[(size_t(h) * seqlen + row) * 128 + d]) : 0.f;
  float s = fmaxf(block_max(fabsf(v), red), 1e-8f) / 127.f;
  if (d == 0) factor[size_t(h) * padded + row] = s * units;
  q[(size_t(h) * (padded / 64) + row / 64) * kTileBytesQ + swizzled(row % 64, d)] = uint8_t(int8_t(rintf(v / s)));
}
__global__ void prepare_k(const bf16* x, uint8_t* k, float* descale, int seqlen, int tiles) {
  __shared__ float red[4];
  int h = blockIdx.y, b = blockIdx.x, d = threadIdx.x;
  float a = 0;
  for (int i = 0; i < 128; i++) a = fmaxf(a, fabsf(__bfloat162float(x[(size_t(h) * seqlen + min(b * 128 + i, seqlen - 1)) * 128 + d])));
  float s = fmaxf(block_max(a, red), 1e-8f) / 127.f;
  if (d == 0) descale[size_t(h) * tiles + b] = s;
  for (int i = 0; i < 128; i++) {
    float v = __bfloat162float(x[(size_t(h) * seqlen + min(b * 128 + i, seqlen - 1)) * 128 + d]);
    k[(size_t(h) * tiles + b) * kTileBytesK + swizzled(i, d)] = uint8_t(int8_t(rintf(v / s)));
  }
}
// E4M3 operands of `fast`: Q times `units` (code units per score), K as it is.
__global__ void prepare_fp8(const bf16* x, uint8_t* y, int seqlen, int padded, float units) {
  int h = blockIdx.y, row = blockIdx.x, d = threadIdx.x;
  __nv_fp8_e4m3 e(__bfloat162float(x[(size_t(h) * seqlen + min(row, seqlen - 1)) * 128 + d]) * units);
  y[(size_t(h) * padded + row / 64 * 64) * 128 + swizzled(row % 64, d)] = e.__x;
}
__global__ void prepare_v_descale(const bf16* x, float* descale, int seqlen, int tiles) {
  __shared__ float red[8][128];
  int h = blockIdx.x, d = threadIdx.x;
  float a = 0;
  for (int b = threadIdx.y; b < tiles; b += blockDim.y) {
    float m = 0;
    int n = max(min(128, seqlen - b * 128), 0);
    for (int i = 0; i < n; i++) m += __bfloat162float(x[(size_t(h) * seqlen + b * 128 + i) * 128 + d]);
    m /= max(n, 1);
    for (int i = 0; i < n; i++) a = fmaxf(a, fabsf(__bfloat162float(x[(size_t(h) * seqlen + b * 128 + i) * 128 + d]) - m));
  }
  red[threadIdx.y][d] = a;
  __syncthreads();
  if (threadIdx.y == 0) {
    for (int i = 1; i < 8; i++) a = fmaxf(a, red[i][d]);
    descale[h * 128 + d] = fmaxf(a, 1e-8f) / 448.f;
  }
}
__global__ void prepare_v(const bf16* x, uint8_t* v, float* mean, const float* descale, int seqlen, int tiles, bool phases) {
  int h = blockIdx.y, b = blockIdx.x, d = threadIdx.x, n = max(min(128, seqlen - b * 128), 0);
  float m = 0, err = 0, s = descale[h * 128 + d];
  for (int i = 0; i < n; i++) m += __bfloat162float(x[(size_t(h) * seqlen + b * 128 + i) * 128 + d]);
  m /= max(n, 1);
  uint8_t* tile = v + (size_t(h) * tiles + b) * kTileBytesV;
  for (int position = 0; position < 128; position++) {
    int k = position % 32, i = k % 4, key = position / 32 * 32 + k / 16 * 16 + 2 * (k % 16 / 4) + (i & 1) + 8 * (i >> 1);
    float w = phases && (key & 1) ? kPhaseFactor : 1.f;
    float value = key < n ? (__bfloat162float(x[(size_t(h) * seqlen + b * 128 + key) * 128 + d]) - m) / s : 0.f;
    __nv_fp8_e4m3 e(value * w);
    if (key < n) err += value - float(e) / w;
    tile[swizzled(d, position)] = e.__x;
    if (d < 8) tile[swizzled(128 + d, position)] = d == 2 * (b % kSumBlocks) + (key & 1) && key < n ? 0x38 : 0;
  }
  m += s * err / max(n, 1);
  float* core = mean + (size_t(h) * ((tiles + 7) / 8) + b / 8) * (kMeanBytes / 4);
  core[(d / 8) * 64 + (b % 8 / 4) * 32 + (d % 8) * 4 + b % 4] = __uint_as_float(round_tf32(m / s));
}
__global__ void reference_rows(const bf16* q, const bf16* k, const bf16* v, const int* rows, float* out, float* work, int seqlen, float scale) {
  __shared__ float qq[128];
  __shared__ double red[256];
  int row = rows[blockIdx.x], tid = threadIdx.x;
  float* p = work + size_t(blockIdx.x) * seqlen;
  if (tid < 128) qq[tid] = __bfloat162float(q[size_t(row) * 128 + tid]);
  __syncthreads();
  double mx = -1e300;
  for (int i = tid; i < seqlen; i += 256) {
    double a = 0;
    for (int d = 0; d < 128; d++) a += double(qq[d]) * __bfloat162float(k[size_t(i) * 128 + d]);
    p[i] = float(a * scale);
    mx = fmax(mx, double(p[i]));
  }
  auto reduce = [&](double x, bool is_max) {
    red[tid] = x;
    __syncthreads();
    for (int o = 128; o; o >>= 1) {
      if (tid < o) red[tid] = is_max ? fmax(red[tid], red[tid + o]) : red[tid] + red[tid + o];
      __syncthreads();
    }
    double r = red[0];
    __syncthreads();
    return r;
  };
  mx = reduce(mx, true);
  double l = 0;
  for (int i = tid; i < seqlen; i += 256) { double e = exp(double(p[i]) - mx); p[i] = float(e); l += e; }
  l = reduce(l, false);
  int d = tid & 127, half = tid >> 7;
  double acc = 0;
  for (int i = half; i < seqlen; i += 2) acc += double(p[i]) * __bfloat162float(v[size_t(i) * 128 + d]);
  red[tid] = acc;
  __syncthreads();
  if (half == 0) out[size_t(blockIdx.x) * 128 + d] = float((red[d] + red[d + 128]) / l);
}

using Launch = void (*)(const Params&);
template <class T>
void launch(const Params& p) {
  static bool ready = false;
  auto* kernel = attention<T>;
  constexpr int kBytes = kSharedBytes<T>;
  if (!ready) CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
  ready = true;
  kernel<<<132, T::config.threads(), kBytes>>>(p);
}
struct Variant {
  const char* name;
  Launch launch;
  Config config;
};

// usage: name N H [rounds] [q_scale] [variant index or -1]
inline int run(const std::vector<Variant>& variants, int argc, char** argv) {
  setvbuf(stdout, nullptr, _IOLBF, 0);
  const int seqlen = argc > 1 ? atoi(argv[1]) : 16384, heads = argc > 2 ? atoi(argv[2]) : 8, rounds = argc > 3 ? atoi(argv[3]) : 5;
  const float q_scale = argc > 4 ? atof(argv[4]) : 1.f;
  const int only = argc > 5 ? atoi(argv[5]) : -1;
  const int tiles = (seqlen + 255) / 256 * 2, groups = (tiles + 7) / 8;
  const size_t n = size_t(heads) * seqlen * 128;
  const float scale = 1.f / sqrtf(128.f);
  bf16 *q, *k, *v, *out;
  for (bf16** x : {&q, &k, &v, &out}) CHECK(cudaMalloc(x, n * 2));
  fill<<<1024, 256>>>(q, n, 1, q_scale, false, seqlen);
  fill<<<1024, 256>>>(k, n, 2, 1.f, false, seqlen);
  fill<<<1024, 256>>>(v, n, 3, 1.f, true, seqlen);
  uint8_t *pq[4], *pk, *pv[2];
  float *mean[2], *factor[4], *k_descale, *v_descale;
  CHECK(cudaMalloc(&pk, size_t(heads) * tiles * kTileBytesK));
  CHECK(cudaMalloc(&k_descale, size_t(heads) * tiles * 4));
  CHECK(cudaMalloc(&v_descale, heads * 128 * 4));
  uint8_t *pq8, *pk8;
  const int padded8 = (seqlen + 255) / 256 * 256;
  CHECK(cudaMalloc(&pq8, size_t(heads) * padded8 * 128));
  CHECK(cudaMalloc(&pk8, size_t(heads) * tiles * 128 * 128));
  prepare_fp8<<<dim3(padded8, heads), 128>>>(q, pq8, seqlen, padded8, scale * 1.4426950408889634f * 8.f);
  prepare_fp8<<<dim3(tiles * 128, heads), 128>>>(k, pk8, seqlen, tiles * 128, 1.f);
  for (int consumers : {2, 3}) {
    const int padded = (seqlen + consumers * 128 - 1) / (consumers * 128) * (consumers * 128);
    CHECK(cudaMalloc(&pq[consumers], size_t(heads) * padded * 128));
    CHECK(cudaMalloc(&factor[consumers], size_t(heads) * padded * 4));
    prepare_q<<<dim3(padded, heads), 128>>>(q, pq[consumers], factor[consumers], seqlen, padded, scale * 1.4426950408889634f * 8.f);
  }
  prepare_k<<<dim3(tiles, heads), 128>>>(k, pk, k_descale, seqlen, tiles);
  prepare_v_descale<<<heads, dim3(128, 8)>>>(v, v_descale, seqlen, tiles);
  for (int i = 0; i < 2; i++) {
    CHECK(cudaMalloc(&pv[i], size_t(heads) * tiles * kTileBytesV));
    CHECK(cudaMalloc(&mean[i], size_t(heads) * groups * kMeanBytes));
    CHECK(cudaMemset(mean[i], 0, size_t(heads) * groups * kMeanBytes));
    prepare_v<<<dim3(tiles, heads), 128>>>(v, pv[i], mean[i], v_descale, seqlen, tiles, i == 1);
  }
  CHECK(cudaDeviceSynchronize());
  constexpr int kRows = 64;
  std::vector<int> rows(kRows);
  for (int i = 0; i < kRows; i++) rows[i] = int(hash(i + 5) % seqlen);
  rows[0] = 0;
  rows[1] = seqlen - 1;
  const int head = heads - 1;  // the last one: offsets count
  int* drows;
  float *dref, *work;
  CHECK(cudaMalloc(&drows, kRows * 4));
  CHECK(cudaMalloc(&dref, kRows * 128 * 4));
  CHECK(cudaMalloc(&work, size_t(kRows) * seqlen * 4));
  CHECK(cudaMemcpy(drows, rows.data(), kRows * 4, cudaMemcpyHostToDevice));
  const size_t skip = size_t(head) * seqlen * 128;
  reference_rows<<<kRows, 256>>>(q + skip, k + skip, v + skip, drows, dref, work, seqlen, scale);
  CHECK(cudaDeviceSynchronize());
  std::vector<float> ref(kRows * 128);
  CHECK(cudaMemcpy(ref.data(), dref, ref.size() * 4, cudaMemcpyDeviceToHost));

  uint64_t* stamps;
  CHECK(cudaMalloc(&stamps, 32));
  std::vector<double> clocks(variants.size());
  std::vector<bf16> host(n);
  std::vector<std::vector<float>> times(variants.size());
  std::vector<double> errors(variants.size());
  std::vector<size_t> unwritten(variants.size());
  cudaEvent_t start, stop;
  CHECK(cudaEventCreate(&start));
  CHECK(cudaEventCreate(&stop));
  auto params = [&](const Variant& x) {
    const int c = x.config.consumers;
    const bool f16 = x.config.convert == Convert::kF16;
    return Params{f16 ? pq8 : pq[c], f16 ? pk8 : pk, pv[x.config.phases], mean[x.config.phases], factor[c], k_descale, v_descale, out, seqlen, heads, tiles,
                  (seqlen + c * 128 - 1) / (c * 128), 1u, stamps};
  };
  for (int round = -1; round < rounds; round++) {
    for (size_t i = 0; i < variants.size(); i++) {
      if (only >= 0 && size_t(only) != i) continue;
      const Params p = params(variants[i]);
      if (round < 0) CHECK(cudaMemset(out, 0xff, n * 2));
      CHECK(cudaEventRecord(start));
      variants[i].launch(p);
      CHECK(cudaGetLastError());
      CHECK(cudaEventRecord(stop));
      CHECK(cudaEventSynchronize(stop));
      float ms;
      CHECK(cudaEventElapsedTime(&ms, start, stop));
      uint64_t st[4];
      CHECK(cudaMemcpy(st, stamps, 32, cudaMemcpyDeviceToHost));
      clocks[i] = double(st[2] - st[0]) / double(st[3] - st[1]);
      if (round >= 0) { times[i].push_back(ms); continue; }
      CHECK(cudaMemcpy(host.data(), out, n * 2, cudaMemcpyDeviceToHost));
      size_t bad = 0;
      for (bf16 x : host) bad += !std::isfinite(__bfloat162float(x));
      unwritten[i] = bad;
      double e = 0, r = 0;
      for (int a = 0; a < kRows; a++) for (int d = 0; d < 128; d++) {
        double x = __bfloat162float(host[skip + size_t(rows[a]) * 128 + d]), y = ref[a * 128 + d];
        e += (x - y) * (x - y);
        r += y * y;
      }
      errors[i] = std::sqrt(e / r);
      if (getenv("DIAGNOSE")) {
        std::vector<int> per_row(seqlen), per_channel(128);
        for (size_t x = 0; x < size_t(seqlen) * 128; x++) if (!std::isfinite(__bfloat162float(host[skip + x]))) { per_row[x / 128]++; per_channel[x % 128]++; }
        printf("%s N=%d: bad rows:", variants[i].name, seqlen);
        for (int x = 0, c = 0; x < seqlen && c < 24; x++) if (per_row[x]) { printf(" %d(%d)", x, per_row[x]); c++; }
        printf("  bad channels:");
        for (int x = 0; x < 128; x++) if (per_channel[x]) printf(" %d(%d)", x, per_channel[x]);
        printf("\n  rows off:");
        for (int a = 0; a < kRows; a++) {
          double er = 0, rr = 0;
          for (int d = 0; d < 128; d++) { double p = __bfloat162float(host[skip + size_t(rows[a]) * 128 + d]), q = ref[a * 128 + d]; er += (p - q) * (p - q); rr += q * q; }
          if (!(er / rr < 0.01)) printf(" %d(%.2f)", rows[a], std::sqrt(er / rr));
        }
        printf("\n");
      }
    }
  }
  for (size_t i = 0; i < variants.size(); i++) {
    if (times[i].empty()) { if (only < 0) printf("N=%d H=%d %-34s err %.5f bad %zu\n", seqlen, heads, variants[i].name, errors[i], unwritten[i]); continue; }
    std::sort(times[i].begin(), times[i].end());
    const double ms = times[i][times[i].size() / 2];
    printf("N=%d H=%d %-34s %8.3f ms  %7.1f TFLOP/s  (%.3f .. %.3f)  %.3f GHz %5.0f cycles/tile  err %.5f  not finite %zu\n", seqlen, heads, variants[i].name, ms,
           4.0 * heads * double(seqlen) * seqlen * 128 / ms / 1e9, times[i].front(), times[i].back(), clocks[i], ms * 1e6 * clocks[i] * 132 / (double(heads) * (seqlen / 64.0) * (seqlen / 128.0)), errors[i], unwritten[i]);
  }
  return 0;
}
}  // namespace lab
