// The door to Python: XLA's FFI handlers, and a few plain functions that ctypes calls.

#include <algorithm>
#include <atomic>
#include <cstring>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "kernels.h"
#include "pack.h"
#include "pool.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace minfer {
namespace {

const Kernels* const kVariants[] = {
#if defined(__x86_64__)
    &kAvx512, &kAvx2,
#endif
    &kPortable};

bool runs_here(const Kernels& k) {
#if defined(__x86_64__)
  if (&k == &kAvx512) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vnni");
  }
  if (&k == &kAvx2) {
    // F16C, which Clang has no name for here, is older than AVX2.
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  }
#endif
  return true;
}

std::atomic<const Kernels*> chosen{nullptr};

const Kernels& kernels() {
  if (const Kernels* k = chosen.load(std::memory_order_relaxed)) return *k;
  const Kernels* const* best = kVariants;
  while (!runs_here(**best)) ++best;
  const Kernels* none = nullptr;  // unless another thread has chosen meanwhile
  return *(chosen.compare_exchange_strong(none, *best) ? *best : none);
}

Pool pool_of(ffi::ThreadPool& xla) {
  return {&xla, static_cast<uint32_t>(std::max<int64_t>(1, xla.num_threads()))};
}

using F32Buffer = ffi::Buffer<ffi::F32>;
using S32Buffer = ffi::Buffer<ffi::S32>;
constexpr int kMaxParts = 8;

// Rows of `array`, or nothing if they do not lie within.
Part part_of(ffi::Buffer<ffi::U8> array, int32_t type, int64_t offset, int64_t rows, int64_t k) {
  const Layout* layout = find_layout(type);
  if (!layout || k < 1 || k % layout->columns || rows < 1 || offset < 0) return {};
  int64_t tiles = (rows + kTileRows - 1) / kTileRows;
  int64_t end = offset + matrix_size(*layout, tiles, k);
  if (end > static_cast<int64_t>(array.element_count())) return {};
  const uint8_t* data = array.typed_data() + offset;
  return {data, data + tiles * tile_size(*layout, k), type, rows};
}

ffi::Error linear(ffi::ThreadPool xla, F32Buffer x, ffi::RemainingArgs arrays,
                  ffi::Span<const int32_t> part_array, ffi::Span<const int32_t> part_type,
                  ffi::Span<const int64_t> part_offset, ffi::Span<const int64_t> part_rows,
                  int32_t gate, float eps, float margin, ffi::Result<F32Buffer> y) {
  LinearArgs a{};
  a.n = x.dimensions()[0], a.k = x.dimensions()[1];
  a.x = x.typed_data(), a.y = y->typed_data();
  a.gate = static_cast<Gate>(gate), a.eps = eps, a.margin = margin;
  a.n_parts = static_cast<int32_t>(part_type.size());
  Part parts[kMaxParts];
  size_t n_parts = part_type.size();
  if (n_parts < 1 || n_parts > kMaxParts || part_array.size() != n_parts ||
      part_offset.size() != n_parts || part_rows.size() != n_parts) {
    return ffi::Error::InvalidArgument("one to eight parts, each with all attributes");
  }
  int64_t columns = 0;
  for (size_t i = 0; i < n_parts; ++i) {
    auto array = arrays.get<ffi::Buffer<ffi::U8>>(part_array[i]);
    if (array) parts[i] = part_of(*array, part_type[i], part_offset[i], part_rows[i], a.k);
    if (!array || !parts[i].data) {
      return ffi::Error::InvalidArgument("not a tiled matrix, or rows past the end of it");
    }
    columns += parts[i].rows;
  }
  if (gate && (n_parts != 2 || parts[0].rows != parts[1].rows)) {
    return ffi::Error::InvalidArgument("a gate takes two parts of equally many rows");
  }
  if (margin > 0.0f && (n_parts != 1 || gate)) {
    return ffi::Error::InvalidArgument("a margin takes one part and no gate");
  }
  if (y->dimensions()[1] != (gate ? columns / 2 : columns)) {
    return ffi::Error::InvalidArgument("the result has not as many columns as there are rows");
  }
  a.parts = parts;
  if (eps >= 0.0f) {  // then the last array holds a norm's weights
    auto norm = arrays.get<F32Buffer>(arrays.size() - 1);
    if (!norm) return ffi::Error::InvalidArgument("norm weights are float32");
    a.norm = norm->typed_data();
  }
  kernels().linear(pool_of(xla), a);
  return ffi::Error::Success();
}

ffi::Error experts(ffi::ThreadPool xla, F32Buffer x, S32Buffer ids, ffi::RemainingArgs arrays,
                   ffi::Span<const int32_t> part_array, ffi::Span<const int32_t> part_type,
                   ffi::Span<const int64_t> part_offset, ffi::Span<const int64_t> part_stride,
                   int64_t rows, int64_t n_experts, int32_t gate, ffi::Result<F32Buffer> y) {
  ExpertsArgs a{};
  a.one.n = y->dimensions()[0], a.one.k = x.dimensions()[1];
  a.one.x = x.typed_data(), a.one.y = y->typed_data(), a.one.eps = -1.0f;
  a.one.gate = static_cast<Gate>(gate);
  a.ids = ids.typed_data(), a.strides = part_stride.begin(), a.n_experts = n_experts;
  size_t n_parts = part_type.size();
  Part parts[2];
  if (n_parts != (gate ? 2 : 1) || part_array.size() != n_parts ||
      part_offset.size() != n_parts || part_stride.size() != n_parts) {
    return ffi::Error::InvalidArgument("one part, or two with a gate, each with all attributes");
  }
  for (size_t i = 0; i < n_parts; ++i) {
    auto array = arrays.get<ffi::Buffer<ffi::U8>>(part_array[i]);
    if (array) {
      parts[i] = part_of(*array, part_type[i], part_offset[i], rows, a.one.k);
      int64_t last = part_offset[i] + (n_experts - 1) * part_stride[i];
      if (!part_of(*array, part_type[i], last, rows, a.one.k).data) parts[i] = {};
    }
    if (!array || !parts[i].data) {
      return ffi::Error::InvalidArgument("not a tiled matrix, or experts past the end of it");
    }
  }
  if (x.dimensions()[0] < 1 || a.one.n % x.dimensions()[0] || y->dimensions()[1] != rows ||
      static_cast<int64_t>(ids.element_count()) != a.one.n) {
    return ffi::Error::InvalidArgument("rows of x, ids and the result do not fit each other");
  }
  a.share = a.one.n / x.dimensions()[0];
  a.one.parts = parts, a.one.n_parts = static_cast<int32_t>(n_parts);
  kernels().experts(pool_of(xla), a);
  return ffi::Error::Success();
}

ffi::Error take(ffi::ThreadPool xla, S32Buffer ids, ffi::Buffer<ffi::U8> table, int32_t type,
                int64_t offset, int64_t rows, ffi::Result<F32Buffer> y) {
  TakeArgs a{};
  a.n = y->dimensions()[0], a.k = y->dimensions()[1];
  a.table = part_of(table, type, offset, rows, a.k);
  if (!a.table.data) return ffi::Error::InvalidArgument("rows past the end of a tiled matrix");
  a.ids = ids.typed_data(), a.y = y->typed_data();
  kernels().take(pool_of(xla), a);
  return ffi::Error::Success();
}

ffi::Error add_normed(ffi::ThreadPool xla, F32Buffer x, F32Buffer y, F32Buffer norm, float eps,
                      ffi::Result<F32Buffer> out) {
  AddNormedArgs a{};
  a.x = x.typed_data(), a.y = y.typed_data(), a.norm = norm.typed_data();
  a.n = x.dimensions()[0], a.k = x.dimensions()[1], a.eps = eps;
  a.out = out->typed_data();
  kernels().add_normed(pool_of(xla), a);
  return ffi::Error::Success();
}

// Whether regions have arrays of this type, and of which type they then are.
bool kv_type_of(ffi::DataType array, KVType* type) {
  switch (array) {
    case ffi::F32: return *type = kKVF32, true;
    case ffi::F16: return *type = kKVF16, true;
    case ffi::U16: return *type = kKVBF16, true;
    case ffi::S8: return *type = kKVQ8_0, true;
    case ffi::U8: return *type = kKVQ4_0, true;
    default: return false;
  }
}

// Where head `head` of an array [heads, n_cells, ...] begins.
void* head_of(ffi::AnyBuffer array, int64_t head) {
  auto dims = array.dimensions();
  int64_t bytes = static_cast<int64_t>(ffi::ByteWidth(array.element_type()));
  return static_cast<uint8_t*>(array.untyped_data()) + head * dims[1] * dims[2] * bytes;
}

// The heads from `head` on of the region whose first array is number *next, which goes behind its
// last. A region has heads [h_kv] of `n_cells` cells for every layer, or false is returned.
bool region_of(ffi::RemainingRets arrays, size_t* next, int64_t head, int64_t n_heads,
               int64_t n_cells, Region* region) {
  auto values = arrays.get<ffi::AnyBuffer>((*next)++);
  if (!values || !kv_type_of((*values)->element_type(), &region->type)) return false;
  auto dims = (*values)->dimensions();
  if (dims.size() != 3 || head + n_heads > dims[0] || n_cells != dims[1]) return false;
  region->values = head_of(**values, head);
  region->scales = nullptr;
  region->d = region->type == kKVQ4_0 ? 2 * dims[2] : dims[2];
  if (region->type != kKVQ8_0 && region->type != kKVQ4_0) return true;
  auto scales = arrays.get<ffi::Buffer<ffi::F16>>((*next)++);
  if (!scales || (*scales)->dimensions().size() != 3 || region->d % 32) return false;
  int64_t count = dims[0] * dims[1] * (region->d / 32);
  if (static_cast<int64_t>((*scales)->element_count()) != count) return false;
  auto* halves = reinterpret_cast<uint16_t*>((*scales)->untyped_data());
  region->scales = halves + head * n_cells * (region->d / 32);
  return true;
}

// The three arrays from number `first` on, of `n` rows and `n_cells` cells.
bool map_of(ffi::RemainingArgs arrays, size_t first, int64_t n, int64_t n_cells, Map* map) {
  auto pos = arrays.get<S32Buffer>(first), seq = arrays.get<S32Buffer>(first + 1);
  auto cells = arrays.get<S32Buffer>(first + 2);
  if (!pos || !seq || !cells) return false;
  auto dims = cells->dimensions();
  if (dims.size() != 2 || dims[0] < 2 || dims[1] != n_cells) return false;
  for (auto rows : {*pos, *seq}) {
    if (static_cast<int64_t>(rows.element_count()) != n) return false;
  }
  const int32_t* data = cells->typed_data();
  *map = {pos->typed_data(), seq->typed_data(), data, data + n_cells, dims[0] - 1};
  return true;
}

// Behind `last` come the arrays of K, those of V, perhaps a map, and perhaps two norms.
ffi::Error attend(ffi::ThreadPool xla, F32Buffer qkv, F32Buffer cosine, F32Buffer sine,
                  S32Buffer cell, S32Buffer first, S32Buffer last, ffi::RemainingArgs more,
                  int64_t layer, int64_t n_head, int64_t n_head_kv, bool interleaved,
                  int64_t window, float scale, float cap, float eps, ffi::Result<F32Buffer> out,
                  ffi::RemainingRets regions) {
  AttendArgs a{};
  a.qkv = qkv.typed_data();
  a.cosine = cosine.typed_data(), a.sine = sine.typed_data();
  a.cell = cell.typed_data(), a.first = first.typed_data(), a.last = last.typed_data();
  a.out = out->typed_data();
  a.n = qkv.dimensions()[0], a.h = n_head, a.h_kv = n_head_kv;
  a.n_rot = 2 * cosine.dimensions()[1];
  a.window = window, a.scale = scale, a.cap = cap, a.eps = eps, a.interleaved = interleaved;
  auto any = regions.get<ffi::AnyBuffer>(0);
  if (!any || (*any)->dimensions().size() != 3 || layer < 0 || n_head_kv < 1 ||
      layer >= (*any)->dimensions()[0] / n_head_kv) {
    return ffi::Error::InvalidArgument("a layer past the end of a region");
  }
  a.n_cells = (*any)->dimensions()[1];
  size_t next = 0;
  for (Region* region : {&a.k, &a.v}) {
    if (!region_of(regions, &next, layer * n_head_kv, n_head_kv, a.n_cells, region)) {
      return ffi::Error::InvalidArgument("not a region of K and one of V");
    }
  }
  a.d_k = a.k.d, a.d_v = a.v.d;
  size_t rest = more.size() - next;
  if (rest == 3 || rest == 5) {
    if (!map_of(more, next, a.n, a.n_cells, &a.map)) {
      return ffi::Error::InvalidArgument("not a map of the rows and cells");
    }
    next += 3, rest -= 3;
  }
  if (rest == 2) {
    auto q_norm = more.get<F32Buffer>(next), k_norm = more.get<F32Buffer>(next + 1);
    if (!q_norm || !k_norm) return ffi::Error::InvalidArgument("norm weights are float32");
    a.q_norm = q_norm->typed_data(), a.k_norm = k_norm->typed_data();
  }
  kernels().attend(pool_of(xla), a);
  return ffi::Error::Success();
}

// Zeros in large pages, where the system gives them: they are asked for before memory is touched.
// Rows of a region that lie far apart otherwise cost the translation of an address each.
static ffi::Error zeros(ffi::ThreadPool xla, ffi::Result<ffi::AnyBuffer> out) {
  struct Job {
    uint8_t* memory;
    size_t bytes;
  } job = {static_cast<uint8_t*>(out->untyped_data()), out->size_bytes()};
#if defined(__linux__)
  constexpr uintptr_t kLargePage = uintptr_t{1} << 21;
  uintptr_t begin = reinterpret_cast<uintptr_t>(job.memory), end = begin + job.bytes;
  begin = (begin + kLargePage - 1) / kLargePage * kLargePage, end = end / kLargePage * kLargePage;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
  constexpr size_t kPiece = size_t{1} << 22;
  auto body = [](void* data, uint32_t piece) {
    const Job& job = *static_cast<const Job*>(data);
    size_t begin = piece * kPiece, left = job.bytes - begin;
    memset(job.memory + begin, 0, left < kPiece ? left : kPiece);
  };
  share(pool_of(xla), static_cast<uint32_t>((job.bytes + kPiece - 1) / kPiece), body, &job);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace minfer

XLA_FFI_DEFINE_HANDLER_SYMBOL(minfer_zeros, minfer::zeros,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Ret<ffi::AnyBuffer>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(minfer_linear, minfer::linear,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<minfer::F32Buffer>()
                                  .RemainingArgs()
                                  .Attr<ffi::Span<const int32_t>>("part_array")
                                  .Attr<ffi::Span<const int32_t>>("part_type")
                                  .Attr<ffi::Span<const int64_t>>("part_offset")
                                  .Attr<ffi::Span<const int64_t>>("part_rows")
                                  .Attr<int32_t>("gate")
                                  .Attr<float>("eps")
                                  .Attr<float>("margin")
                                  .Ret<minfer::F32Buffer>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(minfer_experts, minfer::experts,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<minfer::F32Buffer>()
                                  .Arg<minfer::S32Buffer>()
                                  .RemainingArgs()
                                  .Attr<ffi::Span<const int32_t>>("part_array")
                                  .Attr<ffi::Span<const int32_t>>("part_type")
                                  .Attr<ffi::Span<const int64_t>>("part_offset")
                                  .Attr<ffi::Span<const int64_t>>("part_stride")
                                  .Attr<int64_t>("rows")
                                  .Attr<int64_t>("n_experts")
                                  .Attr<int32_t>("gate")
                                  .Ret<minfer::F32Buffer>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(minfer_take, minfer::take,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<minfer::S32Buffer>()
                                  .Arg<ffi::Buffer<ffi::U8>>()
                                  .Attr<int32_t>("type")
                                  .Attr<int64_t>("offset")
                                  .Attr<int64_t>("rows")
                                  .Ret<minfer::F32Buffer>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(minfer_add_normed, minfer::add_normed,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<minfer::F32Buffer>()
                                  .Arg<minfer::F32Buffer>()
                                  .Arg<minfer::F32Buffer>()
                                  .Attr<float>("eps")
                                  .Ret<minfer::F32Buffer>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(minfer_attend, minfer::attend,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<minfer::F32Buffer>()
                                  .Arg<minfer::F32Buffer>()
                                  .Arg<minfer::F32Buffer>()
                                  .Arg<minfer::S32Buffer>()
                                  .Arg<minfer::S32Buffer>()
                                  .Arg<minfer::S32Buffer>()
                                  .RemainingArgs()
                                  .Attr<int64_t>("layer")
                                  .Attr<int64_t>("n_head")
                                  .Attr<int64_t>("n_head_kv")
                                  .Attr<bool>("interleaved")
                                  .Attr<int64_t>("window")
                                  .Attr<float>("scale")
                                  .Attr<float>("cap")
                                  .Attr<float>("eps")
                                  .Ret<minfer::F32Buffer>()
                                  .RemainingRets());

extern "C" {

// The i-th variant built in, best first, or null past the last one.
const char* minfer_variant(int32_t i) {
  constexpr int n = sizeof(minfer::kVariants) / sizeof(minfer::kVariants[0]);
  return i >= 0 && i < n ? minfer::kVariants[i]->name : nullptr;
}

int32_t minfer_runs_here(int32_t i) {
  return minfer_variant(i) && minfer::runs_here(*minfer::kVariants[i]);
}

// Calls from now on use variant i, which must run here.
void minfer_use(int32_t i) { minfer::chosen.store(minfer::kVariants[i]); }

int32_t minfer_layout() { return minfer::kLayoutVersion; }

// Bytes of a tile of 16 rows, or 0 for a type that has no tiles or a k of no whole blocks.
int64_t minfer_tile_size(int32_t type, int64_t k) {
  const minfer::Layout* layout = minfer::find_layout(type);
  return layout && k > 0 && k % layout->columns == 0 ? minfer::tile_size(*layout, k) : 0;
}

// Bytes of the second tile: 0 but for split types.
int64_t minfer_lower_size(int32_t type, int64_t k) {
  const minfer::Layout* layout = minfer::find_layout(type);
  return layout && k > 0 ? minfer::lower_size(*layout, k) : 0;
}

void minfer_pack(int32_t type, const uint8_t* raw, int64_t rows, int64_t k, int64_t first,
                 int64_t last, uint8_t* tiles) {
  minfer::pack_tiles(*minfer::find_layout(type), raw, rows, k, first, last, tiles);
}
}
