// The kernels for AVX-512 with VNNI.
#if defined(__x86_64__)

#include <immintrin.h>

#include "variant.h"

#if defined(__clang__)
#pragma clang attribute push( \
    __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c"))), \
    apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")
#endif
namespace minfer {
namespace {
constexpr int kRows = 8;  // of activations at a time: twice as many accumulators, of 32 registers
#include "simd_avx512.h"

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
const Kernels kAvx512 = {"avx512", linear, experts, take, add_normed, attend};
}  // namespace minfer
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#endif
