// y[M, N] = x[M, K] @ W[K, N] in float32 for few rows, called by XLA through its foreign function interface.
//
// W comes in panels [P][K][16] (P = ceil(N / 16), the columns after N zero), so that what a thread reads is one stream.
// All rows of a call use a panel while it is in the nearest cache: W is read from memory once whatever M is.
//
// Every y[m, n] is one chain of multiply-adds over k = 0, 1, ..., K - 1 that starts from 0. How rows and panels are
// grouped, and which thread takes them, decides only what is computed beside it: not a bit of the result.

#include <algorithm>
#include <atomic>
#include <cfenv>
#include <cstdint>
#include <cstring>
#include <memory>
#include <thread>

#include "xla/ffi/api/ffi.h"

#if defined(__x86_64__) && defined(__GNUC__)
#define SKINNY_X86 1
#include <immintrin.h>
#else
#define SKINNY_X86 0
#endif

// A loop over sums must be gone before registers are given out, or each sum is written to the stack at every k: a factor
// of four.
#if defined(__clang__)
#define SKINNY_UNROLL _Pragma("clang loop unroll(full)")
#else
#define SKINNY_UNROLL _Pragma("GCC unroll 16")
#endif

namespace {

namespace ffi = xla::ffi;

constexpr int64_t kWidth = 16;        // columns of a panel
constexpr int64_t kChunk = 4;         // panels that a thread takes at a time
constexpr int64_t kSmall = 150000;    // weights below which a second thread costs more than it saves
constexpr int kSpins = 2000;          // looks at the counter before the processor is offered to others

struct Problem {
  const float* x;       // [rows][k]
  const float* panels;  // [count][k][kWidth]
  float* y;             // [rows][n]
  int64_t rows, k, n, count;
};

// A row of a panel's sums to y; the last panel may have fewer columns.
inline void Store(const Problem& p, int64_t row, int64_t panel, const float* sums) {
  const int64_t first = panel * kWidth;
  std::copy_n(sums, std::min(kWidth, p.n - first), p.y + row * p.n + first);
}

// For any processor: vectors of 4, which the compiler makes of what there is.
struct Portable {
  typedef float Vector __attribute__((vector_size(16)));
  static constexpr int kVectors = kWidth / 4;
  static constexpr int64_t kMaxRows = 2;  // 8 sums, 4 of W and 1 of x in 16 registers

  template <int R, int W>
  static void Tile(const Problem& p, int64_t row, int64_t panel) {
    for (int w = 0; w < W; ++w) Panel<R>(p, row, panel + w);
  }

  template <int R>
  static void Panel(const Problem& p, int64_t row, int64_t panel) {
    Vector sums[R][kVectors] = {};
    const float* x = p.x + row * p.k;
    const float* weights = p.panels + panel * p.k * kWidth;
    for (int64_t i = 0; i < p.k; ++i) {
      Vector read[kVectors];
      std::memcpy(read, weights + i * kWidth, sizeof(read));
      SKINNY_UNROLL
      for (int r = 0; r < R; ++r)
        SKINNY_UNROLL
        for (int v = 0; v < kVectors; ++v) sums[r][v] += x[r * p.k + i] * read[v];
    }
    SKINNY_UNROLL
    for (int r = 0; r < R; ++r) {
      float out[kWidth];
      std::memcpy(out, sums[r], sizeof(out));
      Store(p, row + r, panel, out);
    }
  }
};

#if SKINNY_X86
struct Avx2 {
  static constexpr int64_t kMaxRows = 6;  // 12 sums, 2 of W and 1 of x in 16 registers

  template <int R, int W>
  __attribute__((target("avx2,fma"))) static void Tile(const Problem& p, int64_t row, int64_t panel) {
    __m256 sums[R][2 * W];
    SKINNY_UNROLL
    for (int r = 0; r < R; ++r)
      SKINNY_UNROLL
      for (int v = 0; v < 2 * W; ++v) sums[r][v] = _mm256_setzero_ps();
    const float* x = p.x + row * p.k;
    const float* weights = p.panels + panel * p.k * kWidth;
    for (int64_t i = 0; i < p.k; ++i) {
      __m256 read[2 * W];
      SKINNY_UNROLL
      for (int v = 0; v < 2 * W; ++v)
        read[v] = _mm256_loadu_ps(weights + (v / 2) * p.k * kWidth + i * kWidth + (v % 2) * 8);
      SKINNY_UNROLL
      for (int r = 0; r < R; ++r) {
        const __m256 factor = _mm256_broadcast_ss(x + r * p.k + i);
        SKINNY_UNROLL
        for (int v = 0; v < 2 * W; ++v) sums[r][v] = _mm256_fmadd_ps(factor, read[v], sums[r][v]);
      }
    }
    SKINNY_UNROLL
    for (int r = 0; r < R; ++r) {
      SKINNY_UNROLL
      for (int w = 0; w < W; ++w) {
        alignas(32) float out[kWidth];
        _mm256_store_ps(out, sums[r][2 * w]);
        _mm256_store_ps(out + 8, sums[r][2 * w + 1]);
        Store(p, row + r, panel + w, out);
      }
    }
  }
};
#endif

// R rows of panels first..last - 1, W of them at a time: few rows need several panels, or each sum's own latency shows.
template <typename Kind, int R, int W>
void Rows(const Problem& p, int64_t row, int64_t first, int64_t last) {
  int64_t panel = first;
  for (; panel + W <= last; panel += W) Kind::template Tile<R, W>(p, row, panel);
  for (; panel < last; ++panel) Kind::template Tile<R, 1>(p, row, panel);
}

template <typename Kind>
void Take(const Problem& p, int64_t rows, int64_t row, int64_t first, int64_t last) {
  switch (rows) {
    case 1: return Rows<Kind, 1, 4>(p, row, first, last);
    case 2: return Rows<Kind, 2, 2>(p, row, first, last);
    case 3: return Rows<Kind, 3, 2>(p, row, first, last);
    case 4: return Rows<Kind, 4, 1>(p, row, first, last);
    case 5: return Rows<Kind, 5, 1>(p, row, first, last);
    default: return Rows<Kind, 6, 1>(p, row, first, last);
  }
}

// All rows of some panels. Blocks of rows are as even as they can be (8 is 4 + 4, not 6 + 2), and go panel by panel, so
// that the second block finds the panel in the cache.
template <typename Kind>
void Panels(const Problem& p, int64_t first, int64_t last) {
  const int64_t blocks = (p.rows + Kind::kMaxRows - 1) / Kind::kMaxRows;
  if (blocks == 1) return Take<Kind>(p, p.rows, 0, first, last);
  for (int64_t panel = first; panel < last; ++panel) {
    for (int64_t block = 0; block < blocks; ++block) {
      const int64_t row = block * p.rows / blocks;
      Take<Kind>(p, (block + 1) * p.rows / blocks - row, row, panel, panel + 1);
    }
  }
}

using PanelsFn = void (*)(const Problem&, int64_t, int64_t);

PanelsFn Pick(bool portable) {
#if SKINNY_X86
  if (!portable && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return Panels<Avx2>;
#endif
  return Panels<Portable>;
}

// One call's work. Threads that come late find the counter at its end and touch nothing else: by then the buffers of the
// call may be gone, and only the job itself, which they share, is still there.
struct Job {
  Problem problem;
  PanelsFn panels;
  int64_t chunks;
  std::fenv_t floating;  // of the calling thread: denormals and rounding are the same for every chunk
  std::atomic<int64_t> next{0};
  std::atomic<int64_t> finished{0};

  void Work() {
    for (int64_t chunk; (chunk = next.fetch_add(1, std::memory_order_relaxed)) < chunks;) {
      panels(problem, chunk * kChunk, std::min((chunk + 1) * kChunk, problem.count));
      finished.fetch_add(1, std::memory_order_release);
    }
  }

  void Help() {
    if (next.load(std::memory_order_relaxed) >= chunks) return;
    std::fenv_t own;
    std::fegetenv(&own);
    std::fesetenv(&floating);
    Work();
    std::fesetenv(&own);
  }

  // Waits for chunks that other threads are in the middle of; one that nobody began cannot be left.
  void Wait() const {
    for (int spins = 0; finished.load(std::memory_order_acquire) < chunks; ++spins) {
      if (spins > kSpins) {
        std::this_thread::yield();
        continue;
      }
#if SKINNY_X86
      _mm_pause();
#endif
    }
  }
};

ffi::Error Multiply(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::F32> panels,
                    ffi::ResultBuffer<ffi::F32> y, int64_t threads, bool portable) {
  const auto xs = x.dimensions(), ps = panels.dimensions(), ys = y->dimensions();
  if (xs.size() != 2 || ps.size() != 3 || ys.size() != 2 || xs[1] != ps[1] || ps[2] != kWidth || ys[0] != xs[0] ||
      ys[1] > ps[0] * kWidth || ys[1] <= (ps[0] - 1) * kWidth) {
    return ffi::Error::InvalidArgument("skinny_matmul: shapes must be x [M, K], panels [P, K, 16], y [M, N]");
  }
  const Problem problem{x.typed_data(), panels.typed_data(), y->typed_data(), xs[0], xs[1], ys[1], ps[0]};
  const PanelsFn run = Pick(portable);
  const int64_t chunks = (problem.count + kChunk - 1) / kChunk;
  if (threads == 0) threads = problem.k * problem.count * kWidth < kSmall ? 1 : pool.num_threads();
  threads = std::min(threads, chunks);
  if (threads <= 1) {
    run(problem, 0, problem.count);
    return ffi::Error::Success();
  }
  auto job = std::make_shared<Job>();
  job->problem = problem;
  job->panels = run;
  job->chunks = chunks;
  std::fegetenv(&job->floating);
  for (int64_t i = 1; i < threads; ++i) pool.Schedule([job] { job->Help(); });
  job->Work();
  job->Wait();
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(DraftcoSkinnyMatmul, Multiply,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<int64_t>("threads")
                                  .Attr<bool>("portable"));
