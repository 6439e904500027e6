// Sixteen rows at a time on AVX-512 with VNNI. The same names as simd_avx2.h and simd_portable.h.
//
// F32 holds 16 floats, I32 16 integers, U8 64 bytes: four neighbouring columns of 16 rows.
#pragma once

using F32 = __m512;
using I32 = __m512i;
using U8 = __m512i;

// What `dot_wide` adds to the 8-bit quants of a file: they are stored with it, as unsigned bytes.
// The products hold it too, and the caller takes kWideBias * sum(x) off again.
constexpr int kWideBias = 128;

// How many F32 the registers hold: what decides on the sizes of blocks.
constexpr int kRegisters = 32;

static inline F32 f32_zero() { return _mm512_setzero_ps(); }
static inline F32 f32_set(float x) { return _mm512_set1_ps(x); }
static inline F32 f32_load(const float* p) { return _mm512_loadu_ps(p); }
static inline void f32_store(float* p, F32 x) { _mm512_storeu_ps(p, x); }
static inline F32 f32_add(F32 a, F32 b) { return _mm512_add_ps(a, b); }
static inline F32 f32_sub(F32 a, F32 b) { return _mm512_sub_ps(a, b); }
static inline F32 f32_mul(F32 a, F32 b) { return _mm512_mul_ps(a, b); }
static inline F32 f32_div(F32 a, F32 b) { return _mm512_div_ps(a, b); }
static inline F32 f32_max(F32 a, F32 b) { return _mm512_max_ps(a, b); }
static inline F32 f32_min(F32 a, F32 b) { return _mm512_min_ps(a, b); }
static inline F32 f32_abs(F32 a) { return _mm512_abs_ps(a); }
// a * b + c
static inline F32 f32_fma(F32 a, F32 b, F32 c) { return _mm512_fmadd_ps(a, b, c); }
static inline float f32_sum(F32 a) { return _mm512_reduce_add_ps(a); }
static inline float f32_largest(F32 a) { return _mm512_reduce_max_ps(a); }

// Lane i: the sum of rows[i].
static inline F32 f32_sums(const F32 rows[16]) {
  F32 x[8];  // after each step, a lane is a sum of fewer lanes of more rows
  for (int i = 0; i < 8; ++i) {
    x[i] = _mm512_add_ps(_mm512_unpacklo_ps(rows[2 * i], rows[2 * i + 1]),
                         _mm512_unpackhi_ps(rows[2 * i], rows[2 * i + 1]));
  }
  for (int i = 0; i < 4; ++i) {
    __m512d a = _mm512_castps_pd(x[2 * i]), b = _mm512_castps_pd(x[2 * i + 1]);
    x[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)),
                         _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
  }
  for (int i = 0; i < 2; ++i) {
    x[i] = _mm512_add_ps(_mm512_shuffle_f32x4(x[2 * i], x[2 * i + 1], 0x44),
                         _mm512_shuffle_f32x4(x[2 * i], x[2 * i + 1], 0xee));
  }
  return _mm512_add_ps(_mm512_shuffle_f32x4(x[0], x[1], 0x88),
                       _mm512_shuffle_f32x4(x[0], x[1], 0xdd));
}

// Lane j of rows[i] and lane i of rows[j] change places.
static inline void f32_transpose(F32 rows[16]) {
  F32 t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_ps(rows[i], rows[i + 1]);
    t[i + 1] = _mm512_unpackhi_ps(rows[i], rows[i + 1]);
  }
  F32 s[16];  // 4 by 4 within each quarter
  for (int i = 0; i < 16; i += 4) {
    for (int j = 0; j < 2; ++j) {
      __m512d a = _mm512_castps_pd(t[i + j]), b = _mm512_castps_pd(t[i + j + 2]);
      s[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
      s[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
    }
  }
  for (int i = 0; i < 4; ++i) {
    F32 a = _mm512_shuffle_f32x4(s[i], s[4 + i], 0x44);
    F32 b = _mm512_shuffle_f32x4(s[i], s[4 + i], 0xee);
    F32 c = _mm512_shuffle_f32x4(s[8 + i], s[12 + i], 0x44);
    F32 d = _mm512_shuffle_f32x4(s[8 + i], s[12 + i], 0xee);
    rows[i] = _mm512_shuffle_f32x4(a, c, 0x88);
    rows[4 + i] = _mm512_shuffle_f32x4(a, c, 0xdd);
    rows[8 + i] = _mm512_shuffle_f32x4(b, d, 0x88);
    rows[12 + i] = _mm512_shuffle_f32x4(b, d, 0xdd);
  }
}

static inline F32 f32_load_f16(const uint16_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
static inline void f32_store_f16(uint16_t* p, F32 x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
// A float16 in all lanes.
static inline F32 f32_set_f16(const uint16_t* p) {
  return _mm512_cvtph_ps(_mm256_set1_epi16(static_cast<int16_t>(*p)));
}
static inline F32 f32_load_bf16(const uint16_t* p) {
  __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
static inline F32 f32_load_u8(const uint8_t* p) {
  return _mm512_cvtepi32_ps(
      _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
static inline F32 f32_load_i8(const int8_t* p) {
  return _mm512_cvtepi32_ps(
      _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
// The lower (shift 0) or upper (shift 4) halves of 16 bytes.
static inline F32 f32_load_nibbles(const uint8_t* p, int shift) {
  __m512i x = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  x = _mm512_and_si512(_mm512_srl_epi32(x, _mm_cvtsi32_si128(shift)), _mm512_set1_epi32(15));
  return _mm512_cvtepi32_ps(x);
}
// Lanes whose bit is set in `mask`; the others are `other`.
static inline F32 f32_keep(F32 x, uint32_t mask, float other) {
  return _mm512_mask_mov_ps(_mm512_set1_ps(other), static_cast<__mmask16>(mask), x);
}

static inline I32 i32_set(int32_t x) { return _mm512_set1_epi32(x); }
template <int n>
static inline I32 i32_shift_left(I32 x) {
  return _mm512_slli_epi32(x, n);
}
static inline int32_t i32_sum(I32 x) { return _mm512_reduce_add_epi32(x); }
static inline I32 i32_add(I32 a, I32 b) { return _mm512_add_epi32(a, b); }
static inline F32 f32_of(I32 x) { return _mm512_cvtepi32_ps(x); }
// Rounds to the nearest integer, ties to even.
static inline I32 i32_round(F32 x) { return _mm512_cvtps_epi32(x); }
// 2^n for integers n in [-127, 127]; 0 for -127.
static inline F32 f32_exp2i(I32 n) {
  return _mm512_castsi512_ps(
      _mm512_slli_epi32(_mm512_add_epi32(n, _mm512_set1_epi32(127)), 23));
}
// The low bytes of 16 integers in [-128, 127].
static inline void i32_store_i8(int8_t* p, I32 x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(x));
}
// For which of 16 integers below < x[i] <= top, and y[i] has the given bit: bit i.
static inline uint32_t i32_within(const int32_t* x, int32_t below, int32_t top, const int32_t* y,
                                  int32_t bit) {
  __m512i value = _mm512_loadu_si512(x);
  __mmask16 seen = _mm512_cmple_epi32_mask(value, _mm512_set1_epi32(top));
  seen = _mm512_mask_cmpgt_epi32_mask(seen, value, _mm512_set1_epi32(below));
  return _mm512_mask_test_epi32_mask(seen, _mm512_loadu_si512(y), _mm512_set1_epi32(bit));
}
// first + i for every bit i of 16, in order; returns how many. All of to[0..16) may be written.
static inline int64_t i32_store_chosen(int32_t* to, int32_t first, uint32_t bits) {
  __m512i all = _mm512_add_epi32(
      _mm512_set1_epi32(first),
      _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0));
  _mm512_storeu_si512(to, _mm512_maskz_compress_epi32(static_cast<__mmask16>(bits), all));
  return __builtin_popcount(bits);
}

static inline U8 u8_load(const uint8_t* p) { return _mm512_loadu_si512(p); }
static inline void u8_store(uint8_t* p, U8 x) { _mm512_storeu_si512(p, x); }
static inline U8 u8_and(U8 a, uint8_t mask) {
  return _mm512_and_si512(a, _mm512_set1_epi8(static_cast<char>(mask)));
}
static inline U8 u8_or(U8 a, U8 b) { return _mm512_or_si512(a, b); }
// Bytes shifted right (left if n < 0) and masked; bits must not cross bytes under the mask.
template <int n>
static inline U8 u8_shift_and(U8 a, uint8_t mask) {
  if constexpr (n > 0) a = _mm512_srli_epi16(a, n);
  if constexpr (n < 0) a = _mm512_slli_epi16(a, -n);
  return u8_and(a, mask);
}
// acc[i] + the four products of row i's bytes in w (at most 63) with the four signed bytes of x.
static inline I32 dot(I32 acc, U8 w, int32_t x) {
  return _mm512_dpbusd_epi32(acc, w, _mm512_set1_epi32(x));
}
// The same for 8-bit quants, stored with 128 added.
static inline I32 dot_wide(I32 acc, U8 w, int32_t x) { return dot(acc, w, x); }
static inline void prefetch(const void* p) { _mm_prefetch(p, _MM_HINT_T0); }
