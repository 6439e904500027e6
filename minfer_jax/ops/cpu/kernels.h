// What a kernel variant offers. Each variant (kernels_*.cpp) is the same source compiled for one
// instruction set, behind one table of functions; `kernels()` picks a table at run time.
#pragma once

#include <cstdint>

#include "team.h"

namespace minfer {

// Rows of a tiled matrix (see tiles.h); `data` is the first one's tile, `lower` its second tile if
// the type is split.
struct Part {
  const uint8_t* data;
  const uint8_t* lower;
  int32_t type;  // as ggml numbers its types
  int64_t rows;
};

enum Gate : int32_t { kNoGate = 0, kSilu = 1, kGelu = 2 };

// y = x times each part, transposed, side by side: y [n, sum of rows]. With a gate the first half
// of the columns, activated, is multiplied with the second: y [n, half].
struct LinearArgs {
  const float* x;  // [n, k]
  int64_t n, k;
  const float* norm;  // [k]: weights of an RMS norm that x goes through first, or null
  float eps;
  const Part* parts;
  int32_t n_parts;
  Gate gate;
  // Above 0, for a single part of a split type and few rows: all bits of the weights count only for
  // what lies within `margin`, in whole units, of its row's largest (refine.inc).
  float margin;
  float* y;
};

// The same with experts: row i of y is made of row i / share of x and of the parts of expert ids[i].
// Those of expert 0 are given; another's lie `stride` bytes further for each before it, a part.
struct ExpertsArgs {
  LinearArgs one;  // n: rows of y; no norm, no margin
  const int32_t* ids;  // [n]; outside 0..n_experts-1 the row of y is zero
  const int64_t* strides;
  int64_t n_experts, share;
};

// Rows ids[0..n) of a tiled matrix, dequantized: y [n, k].
struct TakeArgs {
  Part table;
  int64_t k;
  const int32_t* ids;
  int64_t n;
  float* y;
};

// out = x + RMS norm of y with weights `norm`; all [n, k].
struct AddNormedArgs {
  const float* x;
  const float* y;
  const float* norm;
  int64_t n, k;
  float eps;
  float* out;
};

// Types of KV regions. Quantized ones have a float16 scale for every 32 values.
enum KVType : int32_t { kKVF32, kKVF16, kKVBF16, kKVQ8_0, kKVQ4_0 };

// The heads of one layer in the region of K or of V, updated in place.
struct Region {
  KVType type;
  void* values;      // [h_kv, n_cells, d], two of them in a byte of kKVQ4_0
  uint16_t* scales;  // [h_kv, n_cells, d / 32] of quantized types
  int64_t d;
};

// Which cells between its first and its last a row sees, if not all: those at a position up to its
// own, and above that less the window, that belong to its sequence.
struct Map {
  const int32_t* row_pos;   // [n]
  const int32_t* row_seq;   // [n]
  const int32_t* cell_pos;  // [n_cells], or null: no map
  const int32_t* cell_seq;  // [words, n_cells]: bit s % 32 of word s / 32 for sequence s
  int64_t words;
};

// One layer's attention from the joined projections on. Rows of q, k, v are normed (optional) and
// rotated, k and v are written to their cells, then every row attends to its cells.
struct AttendArgs {
  const float* qkv;     // [n, h * d_k + h_kv * d_k + h_kv * d_v]: q heads, k heads, v heads
  const float* cosine;  // [n, n_rot / 2]
  const float* sine;
  const float* q_norm;  // [d_k]: weights of an RMS norm over each head, or null
  const float* k_norm;
  const int32_t* cell;   // [n]: where the row's k and v go; outside 0..n_cells-1: nowhere
  const int32_t* first;  // [n]: first cell seen
  const int32_t* last;   // [n]: last cell seen; less than first: none, and the output is zero
  Map map;
  Region k, v;
  float* out;  // [n, h * d_v]
  int64_t n, h, h_kv, d_k, d_v, n_rot, n_cells;
  int64_t window;  // cells (with a map, positions) that a row sees, its own included; 0: no limit
  float scale, cap, eps;
  bool interleaved;  // pairs (2i, 2i+1), else (i, i + n_rot / 2)
};

struct Kernels {
  const char* name;
  void (*linear)(const Pool&, const LinearArgs&);
  void (*experts)(const Pool&, const ExpertsArgs&);
  void (*take)(const Pool&, const TakeArgs&);
  void (*add_normed)(const Pool&, const AddNormedArgs&);
  void (*attend)(const Pool&, const AttendArgs&);
};

// The variants built in. A variant whose instructions this CPU lacks must not be called.
extern const Kernels kAvx512, kAvx2, kPortable;

}  // namespace minfer
