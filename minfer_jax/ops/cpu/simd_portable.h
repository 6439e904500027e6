// Sixteen rows at a time in plain C++: loops that compilers turn into vectors of whatever the
// target has. The same names as simd_avx512.h, which says what they do, and simd_avx2.h.
//
// Where the compiler's own target has NEON's dot product (__ARM_FEATURE_DOTPROD, as on Apple's
// processors), `dot` uses it; <arm_neon.h> has to be included before.
#pragma once

struct F32 {
  float x[16];
};
struct I32 {
  int32_t x[16];
};
struct U8 {
  uint8_t x[64];
};

constexpr int kWideBias = 0;
constexpr int kRegisters = 8;

static inline F32 f32_set(float x) {
  F32 y;
  for (int i = 0; i < 16; ++i) y.x[i] = x;
  return y;
}
static inline F32 f32_zero() { return f32_set(0.0f); }
static inline F32 f32_load(const float* p) {
  F32 y;
  memcpy(y.x, p, sizeof y.x);
  return y;
}
static inline void f32_store(float* p, F32 x) { memcpy(p, x.x, sizeof x.x); }
static inline F32 f32_add(F32 a, F32 b) {
  for (int i = 0; i < 16; ++i) a.x[i] += b.x[i];
  return a;
}
static inline F32 f32_sub(F32 a, F32 b) {
  for (int i = 0; i < 16; ++i) a.x[i] -= b.x[i];
  return a;
}
static inline F32 f32_mul(F32 a, F32 b) {
  for (int i = 0; i < 16; ++i) a.x[i] *= b.x[i];
  return a;
}
static inline F32 f32_div(F32 a, F32 b) {
  for (int i = 0; i < 16; ++i) a.x[i] /= b.x[i];
  return a;
}
// Of a NaN and anything, the second: as x86 does.
static inline F32 f32_max(F32 a, F32 b) {
  for (int i = 0; i < 16; ++i) a.x[i] = a.x[i] > b.x[i] ? a.x[i] : b.x[i];
  return a;
}
static inline F32 f32_min(F32 a, F32 b) {
  for (int i = 0; i < 16; ++i) a.x[i] = a.x[i] < b.x[i] ? a.x[i] : b.x[i];
  return a;
}
static inline F32 f32_abs(F32 a) {
  for (int i = 0; i < 16; ++i) a.x[i] = fabsf(a.x[i]);
  return a;
}
static inline F32 f32_fma(F32 a, F32 b, F32 c) {
  for (int i = 0; i < 16; ++i) c.x[i] += a.x[i] * b.x[i];
  return c;
}
static inline float f32_sum(F32 a) {
  for (int n = 8; n > 0; n /= 2) {
    for (int i = 0; i < n; ++i) a.x[i] += a.x[i + n];
  }
  return a.x[0];
}
static inline float f32_largest(F32 a) {
  for (int n = 8; n > 0; n /= 2) {
    for (int i = 0; i < n; ++i) a.x[i] = a.x[i] > a.x[i + n] ? a.x[i] : a.x[i + n];
  }
  return a.x[0];
}
static inline F32 f32_sums(const F32 rows[16]) {
  F32 y;
  for (int i = 0; i < 16; ++i) y.x[i] = f32_sum(rows[i]);
  return y;
}
static inline void f32_transpose(F32 rows[16]) {
  for (int i = 0; i < 16; ++i) {
    for (int j = 0; j < i; ++j) {
      float t = rows[i].x[j];
      rows[i].x[j] = rows[j].x[i];
      rows[j].x[i] = t;
    }
  }
}

static inline float float_of_bits(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}
static inline uint32_t bits_of_float(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}

static inline float float_of_f16(uint16_t h) {
  uint32_t sign = static_cast<uint32_t>(h & 0x8000) << 16, bits = (h & 0x7fffu) << 13;
  if (bits < 0x0400u << 13) {  // zero, or a subnormal: an integer times 2^-24
    uint32_t small = bits_of_float(static_cast<float>(h & 0x3ff) * 0x1p-24f);
    return float_of_bits(sign | small);
  }
  constexpr uint32_t rebias = (127 - 15) << 23;
  bits += rebias;
  if (bits < 0x47800000) return float_of_bits(sign | bits);
  bits += rebias;  // infinity or NaN, which is made quiet
  if (bits & 0x7fffff) bits |= 0x400000;
  return float_of_bits(sign | bits);
}

static inline uint16_t f16_of_float(float x) {
  uint32_t bits = bits_of_float(x), sign = bits >> 16 & 0x8000;
  bits &= 0x7fffffff;
  uint32_t h;
  if (bits > 0x7f800000) {
    h = 0x7e00 | (bits >> 13 & 0x3ff);
  } else if (bits >= 0x477ff000) {  // 65520 and up
    h = 0x7c00;
  } else if (bits >= 0x38800000) {
    // Half a unit of the last place less one, and one more if that place is odd: ties to even.
    h = (bits - (112u << 23) + 0xfff + (bits >> 13 & 1)) >> 13;
  } else if (bits > 0x33000000) {  // above 2^-25: a subnormal
    uint32_t shift = 126 - (bits >> 23), mantissa = 0x800000 | (bits & 0x7fffff);
    uint32_t whole = mantissa >> shift;
    h = (mantissa + (1u << (shift - 1)) - 1 + (whole & 1)) >> shift;
  } else {
    h = 0;
  }
  return static_cast<uint16_t>(sign | h);
}

static inline F32 f32_load_f16(const uint16_t* p) {
  F32 y;
  for (int i = 0; i < 16; ++i) y.x[i] = float_of_f16(p[i]);
  return y;
}
static inline F32 f32_set_f16(const uint16_t* p) { return f32_set(float_of_f16(*p)); }
static inline void f32_store_f16(uint16_t* p, F32 x) {
  for (int i = 0; i < 16; ++i) p[i] = f16_of_float(x.x[i]);
}
static inline F32 f32_load_bf16(const uint16_t* p) {
  F32 y;
  for (int i = 0; i < 16; ++i) y.x[i] = float_of_bits(static_cast<uint32_t>(p[i]) << 16);
  return y;
}
static inline F32 f32_load_u8(const uint8_t* p) {
  F32 y;
  for (int i = 0; i < 16; ++i) y.x[i] = static_cast<float>(p[i]);
  return y;
}
static inline F32 f32_load_i8(const int8_t* p) {
  F32 y;
  for (int i = 0; i < 16; ++i) y.x[i] = static_cast<float>(p[i]);
  return y;
}
static inline F32 f32_load_nibbles(const uint8_t* p, int shift) {
  F32 y;
  for (int i = 0; i < 16; ++i) y.x[i] = static_cast<float>(p[i] >> shift & 15);
  return y;
}
static inline F32 f32_keep(F32 x, uint32_t mask, float other) {
  for (int i = 0; i < 16; ++i) x.x[i] = mask >> i & 1 ? x.x[i] : other;
  return x;
}

static inline I32 i32_set(int32_t x) {
  I32 y;
  for (int i = 0; i < 16; ++i) y.x[i] = x;
  return y;
}
// Sums and shifts wrap, as the vector instructions do.
static inline int32_t wrap(uint32_t x) { return static_cast<int32_t>(x); }
template <int n>
static inline I32 i32_shift_left(I32 a) {
  for (int i = 0; i < 16; ++i) a.x[i] = wrap(static_cast<uint32_t>(a.x[i]) << n);
  return a;
}
static inline I32 i32_add(I32 a, I32 b) {
  for (int i = 0; i < 16; ++i) {
    a.x[i] = wrap(static_cast<uint32_t>(a.x[i]) + static_cast<uint32_t>(b.x[i]));
  }
  return a;
}
static inline int32_t i32_sum(I32 a) {
  uint32_t sum = 0;
  for (int i = 0; i < 16; ++i) sum += static_cast<uint32_t>(a.x[i]);
  return wrap(sum);
}
static inline F32 f32_of(I32 a) {
  F32 y;
  for (int i = 0; i < 16; ++i) y.x[i] = static_cast<float>(a.x[i]);
  return y;
}
static inline I32 i32_round(F32 a) {
  I32 y;
  for (int i = 0; i < 16; ++i) {
    float x = a.x[i], size = fabsf(x);
    // Where floats are 1 apart, an addition rounds to whole numbers; larger ones are whole.
    float whole = size < 0x1p23f ? (size + 0x1p23f) - 0x1p23f : size;
    bool fits = whole < 0x1p31f;
    int32_t n = static_cast<int32_t>(fits ? whole : 0.0f);
    y.x[i] = fits ? (x < 0.0f ? -n : n) : INT32_MIN;
  }
  return y;
}
static inline F32 f32_exp2i(I32 n) {
  F32 y;
  for (int i = 0; i < 16; ++i) {
    y.x[i] = float_of_bits((static_cast<uint32_t>(n.x[i]) + 127u) << 23);
  }
  return y;
}
static inline void i32_store_i8(int8_t* p, I32 a) {
  for (int i = 0; i < 16; ++i) p[i] = static_cast<int8_t>(a.x[i]);
}
static inline uint32_t i32_within(const int32_t* x, int32_t below, int32_t top, const int32_t* y,
                                  int32_t bit) {
  uint32_t seen = 0;
  for (int i = 0; i < 16; ++i) {
    seen |= static_cast<uint32_t>((below < x[i]) & (x[i] <= top) & ((y[i] & bit) != 0)) << i;
  }
  return seen;
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
  U8 y;
  memcpy(y.x, p, sizeof y.x);
  return y;
}
static inline void u8_store(uint8_t* p, U8 a) { memcpy(p, a.x, sizeof a.x); }
static inline U8 u8_and(U8 a, uint8_t mask) {
  for (int i = 0; i < 64; ++i) a.x[i] = static_cast<uint8_t>(a.x[i] & mask);
  return a;
}
static inline U8 u8_or(U8 a, U8 b) {
  for (int i = 0; i < 64; ++i) a.x[i] = static_cast<uint8_t>(a.x[i] | b.x[i]);
  return a;
}
template <int n>
static inline U8 u8_shift_and(U8 a, uint8_t mask) {
  constexpr int right = n > 0 ? n : 0, left = n < 0 ? -n : 0;
  for (int i = 0; i < 64; ++i) a.x[i] = static_cast<uint8_t>(a.x[i] >> right << left & mask);
  return a;
}

#if defined(__ARM_FEATURE_DOTPROD)
static inline I32 dot_signed(I32 acc, const uint8_t* w, uint8_t flip, int32_t x) {
  int8x16_t all = vreinterpretq_s8_s32(vdupq_n_s32(x));
  for (int i = 0; i < 4; ++i) {
    int8x16_t quants = vreinterpretq_s8_u8(veorq_u8(vld1q_u8(w + 16 * i), vdupq_n_u8(flip)));
    vst1q_s32(acc.x + 4 * i, vdotq_s32(vld1q_s32(acc.x + 4 * i), quants, all));
  }
  return acc;
}
#else
static inline I32 dot_signed(I32 acc, const uint8_t* w, uint8_t flip, int32_t x) {
  int8_t four[4];
  memcpy(four, &x, sizeof four);
  for (int i = 0; i < 16; ++i) {
    for (int j = 0; j < 4; ++j) {
      acc.x[i] += static_cast<int8_t>(w[4 * i + j] ^ flip) * four[j];
    }
  }
  return acc;
}
#endif
static inline I32 dot(I32 acc, U8 w, int32_t x) { return dot_signed(acc, w.x, 0, x); }
// Flipping the highest bit takes the 128 off again.
static inline I32 dot_wide(I32 acc, U8 w, int32_t x) { return dot_signed(acc, w.x, 0x80, x); }
static inline void prefetch(const void* p) { __builtin_prefetch(p); }
