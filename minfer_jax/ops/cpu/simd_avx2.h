// Sixteen rows at a time on AVX2, as two halves. The same names as simd_avx512.h and
// simd_portable.h; what they do is said in simd_avx512.h.
#pragma once

struct F32 {
  __m256 lo, hi;
};
struct I32 {
  __m256i lo, hi;
};
struct U8 {
  __m256i lo, hi;
};

constexpr int kWideBias = 0;
constexpr int kRegisters = 8;

static inline F32 f32_zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
static inline F32 f32_set(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
static inline F32 f32_load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
static inline void f32_store(float* p, F32 x) {
  _mm256_storeu_ps(p, x.lo);
  _mm256_storeu_ps(p + 8, x.hi);
}
static inline F32 f32_add(F32 a, F32 b) {
  return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)};
}
static inline F32 f32_sub(F32 a, F32 b) {
  return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)};
}
static inline F32 f32_mul(F32 a, F32 b) {
  return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)};
}
static inline F32 f32_div(F32 a, F32 b) {
  return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)};
}
static inline F32 f32_max(F32 a, F32 b) {
  return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)};
}
static inline F32 f32_min(F32 a, F32 b) {
  return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)};
}
static inline F32 f32_abs(F32 a) {
  __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, a.lo), _mm256_andnot_ps(sign, a.hi)};
}
static inline F32 f32_fma(F32 a, F32 b, F32 c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
static inline float f32_sum(F32 a) {
  __m256 x = _mm256_add_ps(a.lo, a.hi);
  __m128 y = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  y = _mm_add_ps(y, _mm_movehl_ps(y, y));
  return _mm_cvtss_f32(_mm_add_ss(y, _mm_movehdup_ps(y)));
}
static inline float f32_largest(F32 a) {
  __m256 x = _mm256_max_ps(a.lo, a.hi);
  __m128 y = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  y = _mm_max_ps(y, _mm_movehl_ps(y, y));
  return _mm_cvtss_f32(_mm_max_ss(y, _mm_movehdup_ps(y)));
}

// The sums of the halves of a, then those of b.
static inline __m256 add_halves(__m256 a, __m256 b) {
  return _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
}
static inline F32 f32_sums(const F32 rows[16]) {
  __m256 x[8];
  for (int i = 0; i < 8; ++i) {
    x[i] = _mm256_hadd_ps(_mm256_add_ps(rows[2 * i].lo, rows[2 * i].hi),
                          _mm256_add_ps(rows[2 * i + 1].lo, rows[2 * i + 1].hi));
  }
  // Rows 4i .. 4i + 3, either half of a vector.
  for (int i = 0; i < 4; ++i) x[i] = _mm256_hadd_ps(x[2 * i], x[2 * i + 1]);
  return {add_halves(x[0], x[1]), add_halves(x[2], x[3])};
}

static inline void transpose_eight(__m256 r[8]) {
  __m256 t[8];
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
    t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
  }
  __m256 s[8];  // 4 by 4 within each half
  for (int i = 0; i < 8; i += 4) {
    s[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
    s[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
    s[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
    s[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
  }
  for (int i = 0; i < 4; ++i) {
    r[i] = _mm256_permute2f128_ps(s[i], s[4 + i], 0x20);
    r[4 + i] = _mm256_permute2f128_ps(s[i], s[4 + i], 0x31);
  }
}

static inline void f32_transpose(F32 rows[16]) {
  __m256 a[8], b[8], c[8], d[8];
  for (int i = 0; i < 8; ++i) {
    a[i] = rows[i].lo;
    b[i] = rows[i].hi;
    c[i] = rows[8 + i].lo;
    d[i] = rows[8 + i].hi;
  }
  transpose_eight(a);
  transpose_eight(b);
  transpose_eight(c);
  transpose_eight(d);
  for (int i = 0; i < 8; ++i) {
    rows[i] = {a[i], c[i]};
    rows[8 + i] = {b[i], d[i]};
  }
}

static inline F32 f32_load_f16(const uint16_t* p) {
  __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return {_mm256_cvtph_ps(_mm256_castsi256_si128(x)),
          _mm256_cvtph_ps(_mm256_extracti128_si256(x, 1))};
}
static inline void f32_store_f16(uint16_t* p, F32 x) {
  __m128i* to = reinterpret_cast<__m128i*>(p);
  _mm_storeu_si128(to, _mm256_cvtps_ph(x.lo, _MM_FROUND_TO_NEAREST_INT));
  _mm_storeu_si128(to + 1, _mm256_cvtps_ph(x.hi, _MM_FROUND_TO_NEAREST_INT));
}
static inline F32 f32_set_f16(const uint16_t* p) {
  __m256 x = _mm256_cvtph_ps(_mm_set1_epi16(static_cast<int16_t>(*p)));
  return {x, x};
}
static inline F32 f32_load_bf16(const uint16_t* p) {
  const __m128i* from = reinterpret_cast<const __m128i*>(p);
  __m256i lo = _mm256_cvtepu16_epi32(_mm_loadu_si128(from));
  __m256i hi = _mm256_cvtepu16_epi32(_mm_loadu_si128(from + 1));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(lo, 16)),
          _mm256_castsi256_ps(_mm256_slli_epi32(hi, 16))};
}
static inline F32 f32_load_u8(const uint8_t* p) {
  __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(x)),
          _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_srli_si128(x, 8)))};
}
static inline F32 f32_load_i8(const int8_t* p) {
  __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(x)),
          _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(x, 8)))};
}
static inline F32 f32_load_nibbles(const uint8_t* p, int shift) {
  __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  // Bits that come from the neighbouring byte lie above the mask.
  x = _mm_and_si128(_mm_srl_epi16(x, _mm_cvtsi32_si128(shift)), _mm_set1_epi8(15));
  return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(x)),
          _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_srli_si128(x, 8)))};
}
// Lanes of all ones for the lowest eight bits.
static inline __m256i lanes_of(uint32_t bits) {
  __m256i one = _mm256_set_epi32(128, 64, 32, 16, 8, 4, 2, 1);
  __m256i all = _mm256_set1_epi32(static_cast<int32_t>(bits));
  return _mm256_cmpeq_epi32(_mm256_and_si256(all, one), one);
}
static inline F32 f32_keep(F32 x, uint32_t mask, float other) {
  __m256 lo = _mm256_castsi256_ps(lanes_of(mask)), hi = _mm256_castsi256_ps(lanes_of(mask >> 8));
  __m256 out = _mm256_set1_ps(other);
  return {_mm256_blendv_ps(out, x.lo, lo), _mm256_blendv_ps(out, x.hi, hi)};
}

static inline I32 i32_set(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
template <int n>
static inline I32 i32_shift_left(I32 x) {
  return {_mm256_slli_epi32(x.lo, n), _mm256_slli_epi32(x.hi, n)};
}
static inline int32_t i32_sum(I32 x) {
  __m256i y = _mm256_add_epi32(x.lo, x.hi);
  __m128i z = _mm_add_epi32(_mm256_castsi256_si128(y), _mm256_extracti128_si256(y, 1));
  z = _mm_add_epi32(z, _mm_shuffle_epi32(z, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(z, _mm_shuffle_epi32(z, 0xb1)));
}
static inline I32 i32_add(I32 a, I32 b) {
  return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)};
}
static inline F32 f32_of(I32 x) { return {_mm256_cvtepi32_ps(x.lo), _mm256_cvtepi32_ps(x.hi)}; }
static inline I32 i32_round(F32 x) { return {_mm256_cvtps_epi32(x.lo), _mm256_cvtps_epi32(x.hi)}; }
static inline F32 f32_exp2i(I32 n) {
  I32 x = i32_shift_left<23>(i32_add(n, i32_set(127)));
  return {_mm256_castsi256_ps(x.lo), _mm256_castsi256_ps(x.hi)};
}
static inline void i32_store_i8(int8_t* p, I32 x) {
  // Packing goes half by half: words 0-3 8-11 4-7 12-15 of the 16, put in order before the second.
  __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(x.lo, x.hi), 0xd8);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                   _mm_packs_epi16(_mm256_castsi256_si128(words),
                                   _mm256_extracti128_si256(words, 1)));
}
static inline uint32_t eight_within(const int32_t* x, int32_t below, int32_t top, const int32_t* y,
                                    int32_t bit) {
  __m256i value = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x));
  __m256i one = _mm256_set1_epi32(bit);
  __m256i bits = _mm256_and_si256(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(y)), one);
  __m256i seen = _mm256_and_si256(_mm256_cmpgt_epi32(value, _mm256_set1_epi32(below)),
                                  _mm256_cmpeq_epi32(bits, one));
  seen = _mm256_andnot_si256(_mm256_cmpgt_epi32(value, _mm256_set1_epi32(top)), seen);
  return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_castsi256_ps(seen)));
}
static inline uint32_t i32_within(const int32_t* x, int32_t below, int32_t top, const int32_t* y,
                                  int32_t bit) {
  return eight_within(x, below, top, y, bit) | eight_within(x + 8, below, top, y + 8, bit) << 8;
}
static inline int64_t i32_store_chosen(int32_t* to, int32_t first, uint32_t bits) {
  int64_t n = 0;
  for (int i = 0; i < 16; ++i) {  // without a branch: each is overwritten unless its bit is set
    to[n] = first + i;
    n += bits >> i & 1;
  }
  return n;
}

static inline U8 u8_load(const uint8_t* p) {
  const __m256i* from = reinterpret_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(from), _mm256_loadu_si256(from + 1)};
}
static inline void u8_store(uint8_t* p, U8 x) {
  __m256i* to = reinterpret_cast<__m256i*>(p);
  _mm256_storeu_si256(to, x.lo);
  _mm256_storeu_si256(to + 1, x.hi);
}
static inline U8 u8_and(U8 a, uint8_t mask) {
  __m256i m = _mm256_set1_epi8(static_cast<char>(mask));
  return {_mm256_and_si256(a.lo, m), _mm256_and_si256(a.hi, m)};
}
static inline U8 u8_or(U8 a, U8 b) {
  return {_mm256_or_si256(a.lo, b.lo), _mm256_or_si256(a.hi, b.hi)};
}
template <int n>
static inline U8 u8_shift_and(U8 a, uint8_t mask) {
  if constexpr (n > 0) a = {_mm256_srli_epi16(a.lo, n), _mm256_srli_epi16(a.hi, n)};
  if constexpr (n < 0) a = {_mm256_slli_epi16(a.lo, -n), _mm256_slli_epi16(a.hi, -n)};
  return u8_and(a, mask);
}

// Products of unsigned and signed bytes, summed by fours. Pairs are summed in 16 bits on the way.
static inline __m256i dot_half(__m256i acc, __m256i w, __m256i x) {
  __m256i pairs = _mm256_maddubs_epi16(w, x);
  return _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
static inline I32 dot(I32 acc, U8 w, int32_t x) {
  __m256i all = _mm256_set1_epi32(x);
  return {dot_half(acc.lo, w.lo, all), dot_half(acc.hi, w.hi, all)};
}
// The sign of the weight moves to x, whose bytes must be in [-127, 127]: then a pair's sum is at
// most 2 * 128 * 127 and fits.
static inline I32 dot_wide(I32 acc, U8 w, int32_t x) {
  __m256i all = _mm256_set1_epi32(x), offset = _mm256_set1_epi8(-128);
  __m256i lo = _mm256_xor_si256(w.lo, offset), hi = _mm256_xor_si256(w.hi, offset);
  return {dot_half(acc.lo, _mm256_abs_epi8(lo), _mm256_sign_epi8(all, lo)),
          dot_half(acc.hi, _mm256_abs_epi8(hi), _mm256_sign_epi8(all, hi))};
}
static inline void prefetch(const void* p) {
  _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0);
}
