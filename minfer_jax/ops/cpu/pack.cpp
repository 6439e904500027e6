// From the file's blocks to tiles. Runs once a model, so plain code will do.

#include <cstring>

#include "pack.h"

namespace minfer {
namespace {

uint32_t load32(const uint8_t* p) {
  uint32_t x;
  std::memcpy(&x, p, 4);
  return x;
}

void store32(uint8_t* p, uint32_t x) { std::memcpy(p, &x, 4); }

void or32(uint8_t* p, uint32_t x) { store32(p, load32(p) | x); }

// Where the quants of one row begin within a vector: `q` points to the group, `row` is 0..15.
uint8_t* at(uint8_t* q, int vector, int row) { return q + 64 * vector + 4 * row; }

void half(uint8_t* scales, int plane, int row, const uint8_t* from) {
  std::memcpy(scales + 32 * plane + 2 * row, from, 2);
}

// Bit i of 32 in `bits` is column i: the 1-bit plane has column 4k + b in bit k of byte b.
uint32_t bit_plane(uint32_t bits) {
  uint32_t out = 0;
  for (int b = 0; b < 4; ++b) {
    uint32_t byte = 0;
    for (int k = 0; k < 8; ++k) byte |= (bits >> (4 * k + b) & 1) << k;
    out |= byte << (8 * b);
  }
  return out;
}

// 16 bytes of nibbles, columns 0-15 low and 16-31 high, are the plane's order already.
void nibbles(uint8_t* q, int row, const uint8_t* qs) {
  for (int j = 0; j < 4; ++j) store32(at(q, j, row), load32(qs + 4 * j));
}

// Two bits of each column, taken at `shift` from 32 bytes, into the 2-bit plane at `vector`.
void crumbs(uint8_t* q, int vector, int row, const uint8_t* from, int shift) {
  for (int i = 0; i < 8; ++i) {
    uint32_t pair = load32(from + 4 * i) >> shift & 0x03030303u;
    uint8_t* to = at(q, vector + i / 4, row);
    store32(to, (i % 4 ? load32(to) : 0) | pair << (2 * (i % 4)));
  }
}

// One bit of each column, bit `group` of 32 bytes, into the 1-bit plane at `vector`.
void bits(uint8_t* q, int vector, int row, const uint8_t* from, int group) {
  store32(at(q, vector, row), 0);
  for (int i = 0; i < 8; ++i) {
    or32(at(q, vector, row), (load32(from + 4 * i) >> group & 0x01010101u) << i);
  }
}

// `q` and `lower` are the block's first and second tile's quants.
void pack_32(int32_t type, const uint8_t* block, int row, uint8_t* scales, uint8_t* q,
             uint8_t* lower) {
  half(scales, 0, row, block);
  switch (type) {
    case kQ8_0Split: {
      uint8_t raised[32];
      for (int c = 0; c < 32; ++c) raised[c] = block[2 + c] ^ 0x80;
      for (int j = 0; j < 4; ++j) {
        uint32_t a = load32(raised + 4 * j) >> 3 & 0x0f0f0f0fu;
        uint32_t b = load32(raised + 16 + 4 * j) >> 3 & 0x0f0f0f0fu;
        store32(at(q, j, row), a | b << 4);
      }
      bits(q, 4, row, raised, 7);
      crumbs(lower, 0, row, raised, 0);
      return bits(lower, 2, row, raised, 2);
    }
    case kQ4_0:
      return nibbles(q, row, block + 2);
    case kQ4_1:
      half(scales, 1, row, block + 2);
      return nibbles(q, row, block + 4);
    case kQ5_0:
      store32(at(q, 4, row), bit_plane(load32(block + 2)));
      return nibbles(q, row, block + 6);
    case kQ5_1:
      half(scales, 1, row, block + 2);
      store32(at(q, 4, row), bit_plane(load32(block + 4)));
      return nibbles(q, row, block + 8);
    default:  // Q8_0: signed, stored with 128 added
      for (int i = 0; i < 8; ++i) store32(at(q, i, row), load32(block + 2 + 4 * i) ^ 0x80808080u);
  }
}

// Quants of Q4_K and Q5_K: each 32 bytes hold a group in the low and the next in the high nibbles.
void k_nibbles(uint8_t* q, int group, int row, const uint8_t* qs) {
  const uint8_t* from = qs + 32 * (group / 2);
  int shift = 4 * (group % 2);
  for (int j = 0; j < 4; ++j) {
    uint32_t low = load32(from + 4 * j) >> shift & 0x0f0f0f0fu;
    uint32_t high = load32(from + 16 + 4 * j) >> shift & 0x0f0f0f0fu;
    store32(at(q, j, row), low | high << 4);
  }
}

// Sub-scale and sub-minimum of a group out of the 12 bytes of Q4_K and Q5_K, 6 bits each.
void k_scales(uint8_t* scales, int row, const uint8_t* s) {
  for (int g = 0; g < 8; ++g) {
    int i = g % 4;
    bool early = g < 4;
    uint8_t scale = early ? s[i] & 63 : (s[8 + i] & 15) | (s[i] >> 6) << 4;
    uint8_t minimum = early ? s[4 + i] & 63 : s[8 + i] >> 4 | (s[4 + i] >> 6) << 4;
    scales[64 + 16 * g + row] = scale;
    scales[64 + 128 + 16 * g + row] = minimum;
  }
}

void pack_256(int32_t type, const uint8_t* block, int row, uint8_t* scales, uint8_t* q) {
  int size = find_layout(type)->quant_bytes / 8;  // of a group
  switch (type) {
    case kQ4_K:
    case kQ5_K: {
      half(scales, 0, row, block);
      half(scales, 1, row, block + 2);
      k_scales(scales, row, block + 4);
      const uint8_t* qs = block + 16 + (type == kQ5_K ? 32 : 0);
      for (int g = 0; g < 8; ++g) {
        k_nibbles(q + size * g, g, row, qs);
        if (type == kQ5_K) bits(q + size * g, 4, row, block + 16, g);
      }
      return;
    }
    case kQ6_K: {  // ql 128, qh 64, scales 16, d
      half(scales, 0, row, block + 208);
      for (int i = 0; i < 16; ++i) scales[32 + 16 * i + row] = block[192 + i];
      for (int g = 0; g < 8; ++g) {
        const uint8_t* low = block + 64 * (g / 4) + 32 * (g % 2);
        int shift = 4 * (g % 4 / 2);
        for (int j = 0; j < 4; ++j) {
          uint32_t a = load32(low + 4 * j) >> shift & 0x0f0f0f0fu;
          uint32_t b = load32(low + 16 + 4 * j) >> shift & 0x0f0f0f0fu;
          store32(at(q + size * g, j, row), a | b << 4);
        }
        crumbs(q + size * g, 4, row, block + 128 + 32 * (g / 4), 2 * (g % 4));
      }
      return;
    }
    case kQ3_K: {  // hmask 32, qs 64, scales 12, d
      half(scales, 0, row, block + 108);
      const uint8_t* s = block + 96;
      for (int i = 0; i < 16; ++i) {
        int low = s[i % 8] >> (4 * (i / 8)) & 15;
        int high = s[8 + i % 4] >> (2 * (i / 4)) & 3;
        scales[32 + 16 * i + row] = static_cast<uint8_t>((low | high << 4) - 32);
      }
      for (int g = 0; g < 8; ++g) {
        crumbs(q + size * g, 0, row, block + 32 + 32 * (g / 4), 2 * (g % 4));
        bits(q + size * g, 2, row, block, g);
      }
      return;
    }
    default: {  // Q2_K: scales 16, qs 64, d, dmin
      half(scales, 0, row, block + 80);
      half(scales, 1, row, block + 82);
      for (int i = 0; i < 16; ++i) scales[64 + 16 * i + row] = block[i];
      for (int g = 0; g < 8; ++g) {
        crumbs(q + size * g, 0, row, block + 16 + 32 * (g / 4), 2 * (g % 4));
      }
    }
  }
}

}  // namespace

void pack_tiles(const Layout& l, const uint8_t* raw, int64_t rows, int64_t k, int64_t first,
                int64_t last, uint8_t* tiles) {
  int64_t blocks = k / l.columns, row_bytes = blocks * l.file_bytes;
  int64_t size = tile_size(l, k), scales_bytes = scales_size(l, blocks);
  int64_t rest = lower_size(l, k);
  uint8_t* second = tiles + (rows + kTileRows - 1) / kTileRows * size;
  for (int64_t t = first; t < last; ++t) {
    uint8_t* tile = tiles + t * size;
    int64_t left = rows - t * kTileRows;
    int filled = static_cast<int>(left < kTileRows ? left : kTileRows);
    if (filled < kTileRows) {  // missing rows are rows of zeros
      std::memset(tile, 0, size);
      std::memset(second + t * rest, 0, rest);
    }
    for (int r = 0; r < filled; ++r) {
      const uint8_t* row = raw + (t * kTileRows + r) * row_bytes;
      for (int64_t b = 0; b < blocks; ++b) {
        const uint8_t* block = row + b * l.file_bytes;
        uint8_t* scales = tile + b * l.scale_bytes;
        uint8_t* q = tile + scales_bytes + b * l.quant_bytes;
        if (l.columns == 256) {
          pack_256(l.type, block, r, scales, q);
        } else if (l.columns == 32) {
          pack_32(l.type, block, r, scales, q, second + t * rest + b * l.lower_bytes);
        } else {
          std::memcpy(q + r * l.file_bytes, block, l.file_bytes);
        }
      }
    }
  }
}

}  // namespace minfer
