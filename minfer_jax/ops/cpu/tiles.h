// The tiled layout of packed weights.
//
// A matrix [rows, k] is cut into tiles of 16 rows; the last one is filled up with zeros. A tile
// holds its scales, filled up to 64 bytes, and then its quants, both in the order of the columns:
//
//   block formats   scales of block 0, 1, ...; quants of block 0, 1, ...
//   floats          column 0 of 16 rows, column 1, ...
//
// The quants of 32 columns ("group") form eight vectors of 64 bytes, vector i holding columns
// 4i .. 4i+3 of the 16 rows, row by row. They are stored as planes:
//
//   low 4 bits      four vectors; vector j has vector j of the group in its low nibbles and
//                   vector 4 + j in its high ones
//   2 bits          two vectors; vector i of the group lies in vector i / 4, bits 2 (i % 4) and up
//   1 bit           one vector; bit i belongs to vector i of the group
//   8 bits          eight vectors
//
// A matrix of a split type is in two parts, so that a reader can leave out the second: tiles with
// the upper bits of all quants, then, in the same order, tiles with the lower bits and no scales.
//
// Scales of a block are planes over the 16 rows: float16 d, then float16 minimum, then one byte
// per sub-block and row (Q4_K, Q5_K: scales, then minima).
#pragma once

#include <cstdint>

namespace minfer {

enum Type : int32_t {
  kF32 = 0, kF16 = 1, kQ4_0 = 2, kQ4_1 = 3, kQ5_0 = 6, kQ5_1 = 7, kQ8_0 = 8,
  kQ2_K = 10, kQ3_K = 11, kQ4_K = 12, kQ5_K = 13, kQ6_K = 14, kBF16 = 30,
  kQ8_0Split = 1008,  // ours: Q8_0, of whose quants the lower three bits lie apart
  kQ8_0Upper = 1009,  // the first part of such a matrix alone
};

// Raised whenever tiles or the arguments of a handler change, together with LAYOUT in library.py.
constexpr int32_t kLayoutVersion = 5;

constexpr int kTileRows = 16;
constexpr int kGroup = 32;  // columns whose quants are stored together

// Sizes of one block: columns, bytes in the file (one row), bytes in a tile (16 rows), bytes in the
// second tile of a split type.
struct Layout {
  int32_t type, columns, file_bytes, scale_bytes, quant_bytes, lower_bytes = 0;
};

constexpr Layout kLayouts[] = {
    {kF32, 1, 4, 0, 64},
    {kF16, 1, 2, 0, 32},
    {kBF16, 1, 2, 0, 32},
    {kQ4_0, 32, 18, 32, 256},
    {kQ4_1, 32, 20, 64, 256},
    {kQ5_0, 32, 22, 32, 320},
    {kQ5_1, 32, 24, 64, 320},
    {kQ8_0, 32, 34, 32, 512},
    {kQ8_0Split, 32, 34, 32, 320, 192},
    {kQ8_0Upper, 32, 34, 32, 320},
    {kQ2_K, 256, 84, 64 + 256, 8 * 128},
    {kQ3_K, 256, 110, 32 + 256, 8 * 192},
    {kQ4_K, 256, 144, 64 + 256, 8 * 256},
    {kQ5_K, 256, 176, 64 + 256, 8 * 320},
    {kQ6_K, 256, 210, 32 + 256, 8 * 384},
};

// The layout of a type, or null if it cannot be tiled.
static inline const Layout* find_layout(int32_t type) {
  for (const Layout& l : kLayouts) {
    if (l.type == type) return &l;
  }
  return nullptr;
}

// Bytes before the quants of a tile of `blocks` blocks a row.
static inline int64_t scales_size(const Layout& l, int64_t blocks) {
  return (blocks * l.scale_bytes + 63) / 64 * 64;
}

static inline int64_t tile_size(const Layout& l, int64_t k) {
  int64_t blocks = k / l.columns;
  return scales_size(l, blocks) + (blocks * l.quant_bytes + 63) / 64 * 64;
}

static inline int64_t lower_size(const Layout& l, int64_t k) {
  return k / l.columns * l.lower_bytes;
}

// Bytes of a matrix of `tiles` tiles.
static inline int64_t matrix_size(const Layout& l, int64_t tiles, int64_t k) {
  return tiles * (tile_size(l, k) + lower_size(l, k));
}

}  // namespace minfer
