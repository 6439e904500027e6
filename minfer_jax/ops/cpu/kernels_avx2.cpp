// The kernels for AVX2.
#if defined(__x86_64__)

#include <immintrin.h>

#include "variant.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif
namespace minfer {
namespace {
constexpr int kRows = 2;  // of activations at a time: each takes four of the 16 registers
#include "simd_avx2.h"

#include "math.inc"

#include "norm.inc"

#include "formats.inc"

#include "products.inc"

#include "linear.inc"

#include "refine.inc"

#include "calls.inc"

#include "experts.inc"

#include "regions.inc"

#include "seen.inc"

#include "heads.inc"

#include "attend_few.inc"

#include "attention.inc"
}  // namespace
const Kernels kAvx2 = {"avx2", linear, experts, take, add_normed, attend};
}  // namespace minfer
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#endif
